"""Format numbers, lists and tables for people."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


def human_bytes(number: float) -> str:
    """Format `number` bytes in binary units, two decimals from KiB on: "512 B", "1.50 KiB"."""
    if abs(number) < 1024:
        return f"{number:.0f} B"
    value = float(number)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(round(value, 2)) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} PiB"


def human_seconds(value: float) -> str:
    """Format `value` seconds with three digits: "1.23 s", "45.6 ms", "789 us"."""
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def rest_of(total: float, parts: Iterable[float]) -> float:
    """The seconds of `total` that are not among `parts`, as `human_seconds` rounds these."""
    shown, *others = (float(f"{seconds:.3g}") for seconds in (total, *parts))
    return max(0.0, shown - sum(others))


def human_count(number: float) -> str:
    """Format a count in powers of a thousand, two decimals from K on: "999", "6.74B"."""
    if abs(number) < 1000:
        return f"{number:.0f}"
    value = float(number)
    for unit in ("K", "M", "B"):
        value /= 1000
        if abs(round(value, 2)) < 1000:
            return f"{value:.2f}{unit}"
    return f"{value / 1000:.2f}T"


def some_of(names: Sequence[str], joint: str = ", ", shown: int = 4) -> str:
    """Return the first `shown` of `names` and the number of others: "a, b and 3 more"."""
    more = len(names) - shown
    return joint.join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def meant(name: str, names: Iterable[str]) -> str:
    """A question for the one of `names` that the misspelt `name` is like; "" if none is."""
    known = list(names)
    near = [each for each in known if each.startswith(name) or name.startswith(each)]
    near = near or difflib.get_close_matches(name[:80], known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def mesh_text(shape: Sequence[int]) -> str:
    """Format the shape of a mesh of ranks: "8", "2 x 8 (replicate x shard)"."""
    sizes = " x ".join(map(str, shape))
    return f"{sizes} (replicate x shard)" if len(shape) == 2 else sizes


UNITS = {"": 1, "B": 1}


UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}


UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


def bytes_in(text: str) -> int:
    """Parse a number of bytes, such as "1500000", "2GiB" or "1.5 GB"."""
    number = text.rstrip("BiKMGT ")
    try:
        return int(float(number) * UNITS[text[len(number) :].strip()])
    except (ValueError, OverflowError, KeyError):
        units = ", ".join(unit for unit in UNITS if unit)
        raise ValueError(f"{text!r} is not a size: a number and one of {units}") from None


Facts = TypeVar("Facts", bound=Hashable)


@dataclass(frozen=True)
class Folded(Generic[Facts]):
    """One line for `count` rows whose names differ only in an index, and whose facts are equal."""

    name: str
    facts: Facts
    count: int


def fold(rows: Sequence[tuple[str, Facts]]) -> list[Folded[Facts]]:
    """Fold runs of equal layers in `rows` of (dotted name, facts), keeping their order.

    Consecutive rows that share the path up to and including their first index form a layer.
    Consecutive layers with consecutive indices fold if they have the same rows with equal facts.
    The rows within a layer are folded too, so nested repetition folds as well.
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
    """Return the rows from `start` on under `prefix.index`, renamed relative to it, and the end."""
    layer: list[tuple[str, Facts]] = []
    for name, facts in (rows[at] for at in range(start, len(rows))):
        split = _split(name)
        if split is None or split[:2] != (prefix, index):
            break
        layer.append((split[2], facts))
    return layer, start + len(layer)


def _split(name: str) -> tuple[str, int, str] | None:
    """Split `name` at its first index: ("model.layers", 3, "mlp"); None if it has no index."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and str(int(part)) == part:
            return ".".join(parts[:position]), int(part), ".".join(parts[position + 1 :])
    return None


_WIDTH = 100


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: its heading, a rule, its rows."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    yield line(heading)
    yield "-" * (sum(widths) + 2 * (len(widths) - 1))
    yield from map(line, rows)


def sentence(text: str, indent: str = "") -> str:
    """Wrap `text` to lines of at most 100 columns; lines after the first are indented further."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
