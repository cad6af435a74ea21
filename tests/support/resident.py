"""Peaks of resident memory, by Linux's /proc."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_M_MMAP_THRESHOLD = -3  # <malloc.h>


def require_proc() -> None:
    """Skip the test where peaks cannot be reset."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc")


def map_each_above(nbytes: int) -> None:
    """Give each tensor of more bytes a mapping of its own.

    Holes in glibc's heap would change the peaks by chance.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)


def _resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


@contextmanager
def growth(into: dict[str, float], name: str) -> Iterator[None]:
    """Peak resident memory inside above what it was before, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back, not used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    yield
    into[name] = (_resident("VmHWM") - before) / 1e6
