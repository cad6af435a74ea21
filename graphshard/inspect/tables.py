"""Plain tables, the first column to the left, numbers to the right; and sentences in lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

_WIDTH = 100


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table: its heading, a rule, its rows."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    yield line(heading)
    yield "-" * (sum(widths) + 2 * (len(widths) - 1))
    yield from map(line, rows)


def sentence(text: str, indent: str = "") -> str:
    """`text` in lines of at most 100 columns, those after the first indented further."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
