"""From a module to a program."""

import importlib
from typing import TYPE_CHECKING

from graphshard.capture.captured import Capture

if TYPE_CHECKING:
    from graphshard.capture.entry import capture

__all__ = ["Capture", "capture"]


def __getattr__(name: str) -> object:
    """`capture`, which loads all that a trace needs when it is first asked for."""
    if name != "capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.entry").capture
