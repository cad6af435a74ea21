"""A squarified treemap: rectangles with given areas that fill a rectangle, none of them thin.

It follows Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """A rectangle; x to the right, y upwards."""

    left: float
    right: float
    bottom: float
    top: float


def tiles(sizes: Sequence[float], width: float, height: float) -> list[Tile]:
    """Fill the rectangle `width` x `height` with one tile for each of `sizes`, in their order.

    The area of a tile is its size's share of the sum; a size of 0 gets an empty tile.
    """
    total = sum(sizes)
    if not total:
        return [Tile(0.0, 0.0, 0.0, 0.0) for _ in sizes]
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    areas = [sizes[index] * width * height / total for index in order]
    placed: dict[int, Tile] = {}
    left, bottom, right, top = 0.0, 0.0, width, height
    start = 0
    while start < len(areas) and areas[start] > 0:
        side = min(right - left, top - bottom)
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], side) <= _worst(
            areas[start:end], side
        ):
            end += 1
        row = areas[start:end]
        thick = sum(row) / side
        along = 0.0
        for index, area in zip(order[start:end], row, strict=True):
            one, other = along, along + area / thick
            if right - left >= top - bottom:
                placed[index] = Tile(left, left + thick, bottom + one, bottom + other)
            else:
                placed[index] = Tile(left + one, left + other, top - thick, top)
            along = other
        if right - left >= top - bottom:
            left += thick
        else:
            top -= thick
        start = end
    return [placed.get(index, Tile(0.0, 0.0, 0.0, 0.0)) for index in range(len(sizes))]


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of the sides of a tile, if `row` is laid along a `side`."""
    total = sum(row)
    smallest, largest = min(row), max(row)
    if not smallest:
        return float("inf")
    return max(side * side * largest / total**2, total**2 / (side * side * smallest))
