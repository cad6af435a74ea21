"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(number: float) -> str:
    """`number` bytes in binary units, two decimals from KiB on: "512 B", "1.50 KiB"."""
    if abs(number) < 1024:
        return f"{number:.0f} B"
    value = float(number)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(round(value, 2)) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} PiB"


def human_seconds(value: float) -> str:
    """A duration with three digits: "1.23 s", "45.6 ms", "789 us"."""
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def human_count(number: float) -> str:
    """`number` things in powers of a thousand, two decimals from K on: "999", "6.74B"."""
    if abs(number) < 1000:
        return f"{number:.0f}"
    value = float(number)
    for unit in ("K", "M", "B"):
        value /= 1000
        if abs(round(value, 2)) < 1000:
            return f"{value:.2f}{unit}"
    return f"{value / 1000:.2f}T"


def some_of(names: Sequence[str], joint: str = ", ", shown: int = 4) -> str:
    """The first `shown` of `names` and how many more there are: "a, b and 3 more"."""
    more = len(names) - shown
    return joint.join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def mesh_text(shape: Sequence[int]) -> str:
    """A mesh of ranks: "8", "2 x 8 (replicate x shard)"."""
    sizes = " x ".join(map(str, shape))
    return f"{sizes} (replicate x shard)" if len(shape) == 2 else sizes
