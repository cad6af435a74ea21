"""Numbers of bytes as people write them."""

from __future__ import annotations

UNITS = {"": 1, "B": 1}
UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}


def bytes_in(text: str) -> int:
    """Bytes in "1500000", "2GiB", "1.5 GB" and the like.

    Raises:
        ValueError: `text` is no number followed by one of `UNITS`.
    """
    number = text.rstrip("BiKMGT ")
    try:
        return int(float(number) * UNITS[text[len(number) :].strip()])
    except (ValueError, OverflowError, KeyError):
        units = ", ".join(unit for unit in UNITS if unit)
        raise ValueError(f"{text!r} is not a size: a number and one of {units}") from None
