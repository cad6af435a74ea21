"""Every error graphshard raises on purpose.

Each message states the rule that was broken, names what broke it (a parameter, a module, a source
line, a pass) and says what to do.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Iterable
from types import TracebackType

import torch

_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, __file__, contextlib.__file__)
)


def user_line(trace: TracebackType | None) -> str | None:
    """`file:line in function: source` of the innermost frame outside torch and graphshard."""
    return user_line_of(traceback.extract_tb(trace))


def user_line_of(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """As `user_line`, for a stack with the innermost frame last."""
    user_frame = None
    for frame in stack:
        inside_library = frame.filename.startswith(_LIBRARIES[:2]) or frame.filename.startswith("<")
        if not inside_library and frame.filename != contextlib.__file__:
            user_frame = frame
    if user_frame is None or user_frame.lineno is None:
        return None
    source = linecache.getline(user_frame.filename, user_frame.lineno).strip()
    return f"{user_frame.filename}:{user_frame.lineno} in {user_frame.name}: {source}"


class GraphshardError(Exception):
    """Base class of all errors raised by graphshard."""


class PolicyError(GraphshardError):
    """A policy does not fit the model or the mesh, or contradicts itself."""


class PlanError(GraphshardError):
    """The model cannot be planned: its parameters or the world size break a rule of sharding."""


class CaptureError(GraphshardError):
    """The model cannot be captured as one graph. Names the user's source line if there is one."""


class FixedSizeError(CaptureError):
    """The model fixes a size that was declared dynamic; `size` is the dynamic size's name."""

    def __init__(self, message: str, size: str) -> None:
        super().__init__(message)
        self.size = size

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.size)


class PassError(GraphshardError):
    """A pass met a program it cannot rewrite. Names the pass and the node."""


class VerifyError(GraphshardError):
    """A program breaks a rule all programs must keep. Names the pass, the rule, node and unit."""


class RuntimeStateError(GraphshardError):
    """A sharded module was used in an order or a state that is not allowed."""


class CollectiveError(GraphshardError):
    """A collective failed: a rank died, timed out, or runs another sequence of collectives."""


class FingerprintError(CollectiveError):
    """The ranks were about to run different sequences of collectives. Says what differs."""


class CheckpointError(GraphshardError):
    """A state dict does not fit the model. Names the first offending key."""


class UnsupportedTorchError(GraphshardError):
    """The installed torch lacks a private API graphshard needs. Names the versions that have it."""


class CostError(GraphshardError):
    """A cost cannot be estimated: the hardware is not described, or the arguments do not fit."""
