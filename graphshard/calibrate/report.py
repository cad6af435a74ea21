"""The text of a calibration's results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from graphshard.calibrate.run import Calibration, Row


def report(calibration: Calibration) -> str:
    """Return a table of each operator, collective and optimizer, and the hardware's figures."""
    return "\n".join(_lines(calibration))


def _lines(calibration: Calibration) -> Iterator[str]:
    hardware = calibration.hardware
    yield f"hardware    {hardware}"
    yield f"source      {hardware.source}"
    for note in calibration.notes:
        yield f"measured    {note}"
    yield ""
    head = f"{'measured':37}  {'sizes':>5}  {'smallest':>9}  {'largest':>9}  {'rate':>14}  spread"
    yield head
    yield "-" * len(head)
    by_name: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in calibration.rows:
        by_name[row.group, row.name].append(row)
    for (group, name), rows in by_name.items():
        yield _line(group, name, rows)
    yield ""
    for name, (call, tensor, byte) in sorted(hardware.lines.items()):
        rate = f"{1 / byte / 1e9:.2f} GB/s" if byte else "any rate"
        yield f"{name:22}  {_time(call)} a call + {_time(tensor)} a tensor + bytes at {rate}"
    if hardware.contention:
        yield f"communication takes {hardware.contention:.0%} of compute's speed while under way"
    yield f"a step takes {_time(hardware.step_overhead)} besides its operators"
    yield f"operators take {hardware.in_step:.3f} times as long within a step as one by one"
    yield (
        "rate: at the largest size, FLOPs counted for products, bytes for the rest; spread: median "
        "over sizes of the interquartile range, as a part of the median"
    )


def _line(group: str, name: str, rows: Sequence[Row]) -> str:
    ordered = sorted(rows, key=lambda row: row.amount)
    first, last = ordered[0], ordered[-1]
    spread = median(row.spread for row in rows)
    rate = _rate(last) if group != "overhead" else ""
    return (
        f"{name:37}  {len({row.amount for row in rows}):5}  {_time(first.seconds):>9}  "
        f"{_time(last.seconds):>9}  {rate:>14}  {spread:6.1%}"
    )


_PRODUCTS = ("matmul", "bmm", "grouped_mm", "attention", "convolution")


def _rate(row: Row) -> str:
    if row.group == "warm-up" or (row.group == "operators" and row.name.startswith(_PRODUCTS)):
        return f"{row.rate / 1e9:.1f} GFLOP/s"
    return f"{row.rate / 1e9:.2f} GB/s"


def _time(seconds: float) -> str:
    """Return seconds as text with a unit, to three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
