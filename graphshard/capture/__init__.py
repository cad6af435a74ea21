"""From a module to a program."""

from graphshard.capture.entry import Capture, capture

__all__ = ["Capture", "capture"]
