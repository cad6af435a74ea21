"""From a module to a program."""

from graphshard.capture.captured import Capture
from graphshard.capture.entry import capture

__all__ = ["Capture", "capture"]
