"""The largest budget of a policy whose step just fits in memory, by as few tries as possible."""

from __future__ import annotations

from collections.abc import Callable

from graphshard.tune.space import rounded

_CLOSE = 1 << 20
"""Bytes between a budget that fits and one that does not, at which the search for it ends."""


def largest_room(
    left: Callable[[int], int | None], first: int, memory: int, tries: int
) -> int | None:
    """Return the largest budget found that fits; None if none was found.

    Args:
        left: the bytes of memory that a step within this budget leaves: negative if it needs more
            than there is. None if no step keeps within the budget, which is then too small.
        first: the budget to try first.
        memory: bytes; a step within as large a budget does not leave any.
        tries: the most calls of `left`.
    """
    too_small, too_large = 0, memory + 1
    fits = None
    room = first
    for attempt in range(tries):
        if not too_small < room < too_large:
            room = (too_small + too_large) // 2
        room = rounded(room)
        if room <= too_small or too_large - too_small <= min(_CLOSE, memory >> 10):
            break
        rest = left(room)
        if rest is not None and rest < 0:
            too_large = room
        else:
            too_small = room
            fits = fits if rest is None else room
        room = room + rest if rest and attempt < 2 else (too_small + too_large) // 2
    return fits
