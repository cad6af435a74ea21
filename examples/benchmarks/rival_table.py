"""The tables and verdicts of `rivals.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING

from examples.benchmarks.rival_systems import (
    FSDP2,
    FSDP2_BLOCKS,
    FSDP2_WHOLE,
    OURS,
    OURS_COMPILED,
    OURS_OVERLAP,
    SYSTEMS,
)

if TYPE_CHECKING:
    from examples.benchmarks.rivals import Result

HEAD = (
    f"{'':23} {'first':>7} {'step':>9}  {'eager/ [quartiles]':>18}  {'inductor/':>18} "
    f"{'peak':>8} {'transient':>9} {'issued':>6} {'MiB':>7} {'loss':>8}"
)

STEP = 0.90
FAKE_PEAK = 0.90
TRANSIENT = 0.85
TRANSIENT_OVERLAP = 0.65


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The median of paired ratios, and their quartiles."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(found) < 2:
        return found[0], found[0], found[0]
    low, _, high = quantiles(found, n=4, method="inclusive")
    return median(found), low, high


def table(results: Sequence[Result]) -> str:
    """A row per system; below it why those that are not in it are not."""
    by_name = {result.system: result for result in results if not result.why_not}
    notes = {system.name: system.note for system in SYSTEMS}
    lines = [HEAD]
    for result in by_name.values():
        transient = "-" if result.transient is None else f"{mib(result.transient):9.2f}"
        lines.append(
            f"{result.system:23} {result.first:5.1f} s {median(result.times) * 1e3:6.1f} ms  "
            f"{_against(by_name.get(OURS), result)}  "
            f"{_against(by_name.get(OURS_COMPILED), result)} "
            f"{mib(result.peak):8.2f} {transient:>9} {result.collectives:6} "
            f"{mib(result.moved):7.2f} {result.gap:8.1e}"
        )
    lines += [f"  {name}: {notes[name]}" for name in by_name if notes.get(name)]
    lines += [f"not here: {r.system}: {r.why_not}" for r in results if r.why_not]
    return "\n".join(lines)


def _against(ours: Result | None, theirs: Result) -> str:
    if ours is None or ours is theirs:
        return " " * 18
    middle, low, high = ratios(ours.times, theirs.times)
    return f"{middle:.3f} [{low:.2f} {high:.2f}]"


def mib(size: float) -> float:
    """Bytes as MiB."""
    return size / 2**20


def bars(results: Sequence[Result]) -> Iterator[str]:
    """A line per bar that can be judged, met or missed."""
    at = {result.system: result for result in results if not result.why_not}
    if OURS in at and FSDP2 in at:
        ours, theirs = at[OURS], at[FSDP2]
        yield verdict("step, of FSDP2's", ratios(ours.times, theirs.times)[0], STEP)
        yield verdict("peak, of FSDP2's", ours.peak / theirs.peak, 1.0)
        yield verdict("transient, of FSDP2's", part(ours, theirs), TRANSIENT)
        if OURS_OVERLAP in at:
            over = at[OURS_OVERLAP]
            yield verdict("transient, overlap", part(over, theirs), TRANSIENT_OVERLAP)
    compiled = [at[name] for name in (FSDP2_BLOCKS, FSDP2_WHOLE) if name in at]
    if OURS_COMPILED in at and compiled:
        ours = at[OURS_COMPILED]
        best = min(compiled, key=lambda result: median(result.times))
        said = f"step, compiled, of {best.system}'s"
        yield verdict(said, ratios(ours.times, best.times)[0], STEP)
        yield verdict(f"peak, compiled, of {best.system}'s", ours.peak / best.peak, 1.0)
    if FSDP2_WHOLE in at:
        for name in (OURS, OURS_COMPILED):
            if name in at:
                said = f"first step of {name}, of {FSDP2_WHOLE}'s"
                yield verdict(said, at[name].first / at[FSDP2_WHOLE].first, 1.0)


def part(ours: Result, theirs: Result) -> float:
    """Our transient bytes as a part of theirs."""
    assert ours.transient is not None
    assert theirs.transient is not None
    return ours.transient / max(1, theirs.transient)


def verdict(what: str, value: float, bar: float) -> str:
    """One line: what was found, the bar, and whether it is met."""
    said = "met" if value <= bar else "MISSED"
    return f"{what:48} {value:6.3f}  at most {bar:.2f}  {said}"
