"""Pausing or restricting Python's garbage collector while many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = (50_000, 5, 5)
"""See `gc.set_threshold`: a trial of a small graph is still collected with the next few."""


@contextmanager
def pause_collections() -> Iterator[None]:
    """Make no collections inside: for code that makes many lasting objects and few cycles.

    See README.md for the time it saves.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_thresholds: list[tuple[int, int, int]] = []
"""Those to go back to, inside of `collect_only_new`; to count what is frozen takes long."""


@contextmanager
def collect_only_new() -> Iterator[None]:
    """Collect inside, rarely, only objects that were made inside.

    Passes leave cycles (a trial is a whole copy of a graph), which must be collected. The objects
    from before, a captured graph and all of torch, are a million, which each full collection would
    walk, so they are frozen meanwhile. Nothing is done if the heap is frozen already, since it can
    only be unfrozen as a whole.
    """
    if _thresholds or gc.get_freeze_count():
        yield
        return
    _thresholds.append(gc.get_threshold())
    gc.freeze()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*_thresholds.pop())
        gc.unfreeze()
