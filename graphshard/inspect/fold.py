"""Folding: equal layers that follow one another become one line, `layers.0-79.mlp`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Facts = TypeVar("Facts", bound=Hashable)


@dataclass(frozen=True)
class Folded(Generic[Facts]):
    """One line: `count` entries whose names differ only in an index, and whose facts are equal."""

    name: str
    facts: Facts
    count: int


def fold(rows: Sequence[tuple[str, Facts]]) -> list[Folded[Facts]]:
    """Fold runs of equal layers in `rows` of (dotted name, facts), keeping their order.

    Consecutive rows that share the path up to and with their first index form a layer. Layers that
    follow one another fold if their indices do too and they have the same rows with equal facts;
    the rows within a layer are folded first, so nested repetition folds as well.
    """
    folded: list[Folded[Facts]] = []
    start = 0
    while start < len(rows):
        split = _split(rows[start][0])
        if split is None:
            name, facts = rows[start]
            folded.append(Folded(name, facts, 1))
            start += 1
            continue
        prefix, first, _ = split
        layer, end = _layer(rows, start, prefix, first)
        last = first
        while True:
            following, following_end = _layer(rows, end, prefix, last + 1)
            if following != layer:
                break
            last, end = last + 1, following_end
        index = str(first) if first == last else f"{first}-{last}"
        for line in fold(layer):
            name = ".".join(part for part in (prefix, index, line.name) if part)
            folded.append(Folded(name, line.facts, line.count * (last - first + 1)))
        start = end
    return folded


def _layer(
    rows: Sequence[tuple[str, Facts]], start: int, prefix: str, index: int
) -> tuple[list[tuple[str, Facts]], int]:
    """The rows from `start` on under `prefix.index`, named from there, and where they end."""
    layer: list[tuple[str, Facts]] = []
    for name, facts in (rows[at] for at in range(start, len(rows))):
        split = _split(name)
        if split is None or split[:2] != (prefix, index):
            break
        layer.append((split[2], facts))
    return layer, start + len(layer)


def _split(name: str) -> tuple[str, int, str] | None:
    """`name` around its first index: ("model.layers", 3, "mlp"); None if it has no index."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and str(int(part)) == part:
            return ".".join(parts[:position]), int(part), ".".join(parts[position + 1 :])
    return None
