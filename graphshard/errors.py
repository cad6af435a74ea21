"""Every error graphshard raises on purpose.

Each message states the rule that was broken, names what broke it (a parameter, a module, a source
line, a pass) and says what to do.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import torch

_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, __file__, contextlib.__file__)
)


def user_line(trace: TracebackType | None) -> str | None:
    """`file:line in function: source` of the innermost frame outside torch and graphshard."""
    return user_line_of(traceback.extract_tb(trace))


def is_library(file: str) -> bool:
    """Whether `file`, as code names it, belongs to torch or graphshard, or is no file."""
    return file.startswith((*_LIBRARIES, "<"))


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


def user_line_here() -> str | None:
    """`user_line` of the call at hand."""
    frame, _ = _user_frame()
    if frame is None:
        return None
    code = frame.f_code
    return user_line_of([traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)])


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside torch and graphshard, or at the caller's without one."""
    frame, level = _user_frame()
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


def _user_frame() -> tuple[FrameType | None, int]:
    """The innermost frame of a user's, and its number from this function's caller's on."""
    frame: FrameType | None = sys._getframe(2)
    level = 2
    while frame is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


class GraphshardError(Exception):
    """Base class of all errors raised by graphshard."""


class PolicyError(GraphshardError):
    """A policy does not fit the model or the mesh, or contradicts itself."""


class KeywordError(PolicyError, TypeError):
    """A call names an argument that there is not. Names one that may have been meant."""


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


class BudgetError(PolicyError, VerifyError):
    """A step needs more bytes than the policy's `memory_budget`. Names both."""


class RuntimeStateError(GraphshardError):
    """A sharded module was used in an order or a state that is not allowed."""


class ModelChangeError(RuntimeStateError, CaptureError):
    """Code would change the parameters, modules, dtypes or devices of a sharded module."""

    @staticmethod
    def by(method: str, what: object) -> ModelChangeError:
        """The error of a method of the model that would do so."""
        return ModelChangeError(
            f"{method}() changes the model, which a sharded module keeps as it was compiled; call "
            f"it on the model before graphshard.compile, and compile it again ({what})"
        )


class ForeignNameError(RuntimeStateError, AttributeError):
    """A name of DistributedDataParallel or FSDP2 that is nothing here. Says what to use instead."""


class SizeCheckError(GraphshardError):
    """A size or number read off values breaks what the captured program relies on. Names both."""


class NonFiniteError(GraphshardError):
    """A checked step met NaN or infinity (the policy's `check_finite`).

    Attributes:
        unit: FQN of the unit in which it was seen first ("" is the root).
        phase: "forward" or "backward".
        ranks: the ranks on which it was seen there.
        node: the name of the node where it began; None if that is not known.
    """

    def __init__(
        self, message: str, unit: str, phase: str, ranks: tuple[int, ...], node: str | None
    ) -> None:
        super().__init__(message)
        self.unit, self.phase, self.ranks, self.node = unit, phase, ranks, node

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (str(self), self.unit, self.phase, self.ranks, self.node)


class NonFiniteWarning(UserWarning):
    """What `NonFiniteError` says, under `check_finite="warn"`."""


class CollectiveError(GraphshardError):
    """A collective, or a call that all ranks make, failed: a rank died, timed out or raised."""


class FingerprintError(CollectiveError):
    """The ranks were about to make different calls or run different collectives. Names both."""


class CheckpointError(GraphshardError):
    """A state dict does not fit the model. Names the first offending key."""


class ReplicaError(GraphshardError):
    """Copies of one tensor differ between ranks.

    Attributes:
        ranks: by the name of a parameter or buffer, the ranks that differ from most others.
    """

    def __init__(self, message: str, ranks: dict[str, tuple[int, ...]]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, tuple[int, ...]]]]:
        return type(self), (str(self), self.ranks)


class ReplicaWarning(UserWarning):
    """What `ReplicaError` says, from a save that goes on."""


class UnsupportedTorchError(GraphshardError):
    """The installed torch lacks a private API graphshard needs. Names the versions that have it."""


class CostError(GraphshardError):
    """A cost cannot be estimated: the hardware is not described, or the arguments do not fit."""
