"""Torch's profiler: whether one is on, and ranges for it that cost little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphshard.torch_private.compat import private


def profiler_check() -> Callable[[], bool]:
    """The function that tells whether a profiler listens to this thread; it takes 0.1 us.

    True inside `torch.profiler.profile` while it records, and inside `emit_nvtx` or `emit_itt`.
    """
    check: Callable[[], bool] = private("torch._C._autograd", "_profiler_enabled")
    return check


def named_range(name: str) -> Any:
    """A context that a profiler shows as a range; takes 1 us, a `record_function` takes 10."""
    return private("torch._C._profiler", "_RecordFunctionFast")(name)
