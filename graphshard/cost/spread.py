"""The range of a predicted time, and whether two predictions can be told apart.

A machine's `spread` says where measured steps lie about predicted ones, and its `pair_spread` by
how much the ratio of two predictions may be wrong: two policies of one model on one machine share
most of the error. README.md says what they were measured on.
"""

from __future__ import annotations

from typing import NamedTuple

from graphshard.hardware.hardware import Hardware


class Range(NamedTuple):
    """The least and the most seconds that are expected."""

    low: float
    high: float


def range_of(seconds: float, hardware: Hardware) -> Range:
    """Where a step predicted to take `seconds` on `hardware` is expected to lie."""
    low, high = hardware.spread
    return Range(seconds * low, seconds * high)


def apart(one: float, other: float, hardware: Hardware) -> bool:
    """Whether two predicted times on the same `hardware` differ by more than they may be wrong."""
    return abs(one - other) > hardware.pair_spread * min(one, other)


def ranges_apart(one: Range, other: Range) -> bool:
    """Whether two ranges, of different machines, have no time in common."""
    return one.high < other.low or other.high < one.low
