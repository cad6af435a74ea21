"""Keeping Python's garbage collector from walking what planning makes again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = (50_000, 5, 5)
"""See `gc.set_threshold`: a trial of a small graph is still collected with the next few."""


@contextmanager
def collections_off() -> Iterator[None]:
    """No collections inside: for code that makes many objects that stay, few of them in cycles.

    See README.md for the time it saves.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def only_new_collected() -> Iterator[None]:
    """Collections inside look at what is made inside alone.

    Passes leave cycles (a trial is a whole copy of a graph), which must be collected; but what was
    there before, a captured graph and all of torch, is a million objects that each full collection
    would walk. They are frozen meanwhile. And they are rare: a pass over a large graph makes a few
    objects per node, that stay. Where somebody froze the heap already nothing is done, since
    thawing is of all or nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
