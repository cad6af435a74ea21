"""From a module to a program."""

from graphshard.capture.capture import Capture, capture

__all__ = ["Capture", "capture"]
