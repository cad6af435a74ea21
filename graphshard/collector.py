"""Keeping Python's garbage collector from walking what planning makes again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_off() -> Iterator[None]:
    """No collections inside: for what makes many objects that stay, and leaves few in cycles.

    A trace makes millions, and walking them over and over took a tenth of its time; of checking a
    program it took a third, where that has many nodes.
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
    would walk. They are frozen meanwhile. Where somebody froze the heap already nothing is done,
    since thawing is of all or nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
