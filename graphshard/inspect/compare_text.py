"""Two estimates side by side, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from graphshard.cost.compare import Cause, sent
from graphshard.inspect.tables import sentence, table
from graphshard.inspect.units_text import human_bytes, human_seconds

if TYPE_CHECKING:
    from graphshard.cost.compare import Comparison
    from graphshard.cost.estimate import Estimate

_LEAST = 0.002  # of the step, for a difference to be told
_CAUSES = 5
_SAME = 0.0005  # of a number, for a difference that would round to nothing


def compare_text(both: Comparison) -> str:
    """What differs between two estimates: the policies, the numbers, and why."""
    return "\n".join(
        [*_head(both), "", *table(("", *both.names, "difference"), list(_rows(both))), *_why(both)]
    )


def _head(both: Comparison) -> Iterator[str]:
    a, b = both.a, both.b
    model = a.plan.units[0].module_class or "a program"
    yield f"{model}, one training step: {both.names[0]} and {both.names[1]}"
    if (a.hardware, a.plan.mesh_shape) == (b.hardware, b.plan.mesh_shape):
        yield f"both on {a.plan.world_size:,} ranks of {a.hardware.name}"
    else:
        for name, estimate in zip(both.names, (a, b), strict=True):
            yield f"{name} on {estimate.plan.world_size:,} ranks of {estimate.hardware.name}"
    width = max((len(field) for field in both.policy_differences), default=0)
    for field, (one, other) in both.policy_differences.items():
        yield f"  {field.ljust(width)}  {one or '-'} against {other or '-'}"


Row = tuple[str, str, str, str]


def _rows(both: Comparison) -> Iterator[Row]:
    a, b = both.a, both.b
    times: dict[str, Callable[[Estimate], float]] = {
        "step": lambda e: e.step_seconds,
        "  compute": lambda e: e.compute_seconds,
        "  exposed communication": lambda e: e.exposed_seconds,
        "all communication": lambda e: e.communication_seconds,
    }
    for name, value in times.items():
        yield _row(name, value(a), value(b), human_seconds)
    yield _row("TFLOP/s per device", a.tflops_per_gpu, b.tflops_per_gpu, lambda v: f"{v:,.1f}")
    yield "MFU", f"{a.mfu:.1%}", f"{b.mfu:.1%}", ""
    yield _row("peak memory", a.peak_bytes, b.peak_bytes, human_bytes)
    peaks = [estimate.memory.peak.by_category for estimate in (a, b)]
    for category in sorted({**peaks[0], **peaks[1]}, key=lambda c: -peaks[0].get(c, 0)):
        one, other = (peak.get(category, 0) for peak in peaks)
        if one or other:
            yield _row(f"  {category}", one, other, human_bytes)
    yield _row("between steps", a.valley_bytes, b.valley_bytes, human_bytes)
    yield _row("units", len(a.plan.units), len(b.plan.units), lambda v: f"{v:,.0f}")
    (numbers_a, moved_a), (numbers_b, moved_b) = sent(a), sent(b)
    for op in {**numbers_a, **numbers_b}:
        yield _row(op, numbers_a[op], numbers_b[op], lambda v: f"{v:,.0f}")
        yield _row("  bytes", moved_a[op], moved_b[op], human_bytes)


def _row(name: str, one: float, other: float, shown: Callable[[float], str]) -> Row:
    return name, shown(one), shown(other), _change(one, other)


def _change(one: float, other: float) -> str:
    if abs(one - other) < _SAME * one or one == other:
        return "same"
    if not one:
        return "new"
    if not other:
        return "gone"
    return f"{other / one - 1:+.1%}"


def _why(both: Comparison) -> Iterator[str]:
    a, b = both.a, both.b
    first, second = both.names
    gained, least = both.faster_by, _LEAST * max(a.step_seconds, b.step_seconds)
    yield ""
    if abs(gained) <= least:
        yield f"{second} is as fast as {first}."
    else:
        than = "faster" if gained > 0 else "slower"
        share = abs(gained) / a.step_seconds
        yield f"{second} is {share:.1%} {than} than {first}, by {human_seconds(abs(gained))}:"
    compute = a.compute_seconds - b.compute_seconds
    if abs(compute) > least:
        yield f"  {human_seconds(abs(compute))} {_more(compute)} compute{_recomputed(both)}"
    keys = {**both.causes[0], **both.causes[1]}
    changes = []
    for key in keys:
        one, other = (causes.get(key) for causes in both.causes)
        change = (one.seconds if one else 0.0) - (other.seconds if other else 0.0)
        changes.append((change, one, other))
    changes.sort(key=lambda entry: -abs(entry[0]))
    for change, one, other in changes[:_CAUSES]:
        if abs(change) > least:
            told = _told(both, one, other)
            yield sentence(f"{human_seconds(abs(change))} {_more(change)} waiting: {told}", "  ")
    saved = both.smaller_by
    if abs(saved) > _LEAST * a.peak_bytes:
        than = "below" if saved > 0 else "above"
        parts = _categories(both)
        yield sentence(f"{second}'s peak is {human_bytes(abs(saved))} {than} {first}'s: {parts}")
    for name, estimate in zip(both.names, (a, b), strict=True):
        if not estimate.fits:
            yield (
                f"{name} does not fit in the {human_bytes(estimate.hardware.memory_bytes)} of "
                f"{estimate.hardware.name}"
            )


def _more(gained: float) -> str:
    return "less" if gained > 0 else "more"


def _recomputed(both: Comparison) -> str:
    one, other = (e.timeline.recomputed_flops / max(1, e.flops) for e in (both.a, both.b))
    return (
        "" if one == other else f": {other:.0%} of its FLOPs are recomputation, against {one:.0%}"
    )


def _told(both: Comparison, one: Cause | None, other: Cause | None) -> str:
    """What the two wait for, for one kind of reason; why, in the words of who waits longer."""
    first = _seconds(one) >= _seconds(other)
    worse, name = (one, both.names[0]) if first else (other, both.names[1])
    assert worse is not None
    counts = [0 if cause is None else cause.count for cause in (one, other)]
    times = [human_seconds(_seconds(cause)) for cause in (one, other)]
    return (
        f"{worse.op}s in {worse.phase}, {times[0]} ({counts[0]} of them) against {times[1]} "
        f"({counts[1]}); {name} for that of {worse.worst.span.unit or '(root)'}, since "
        f"{worse.text}"
    )


def _seconds(cause: Cause | None) -> float:
    return 0.0 if cause is None else cause.seconds


def _categories(both: Comparison) -> str:
    peaks = [estimate.memory.peak.by_category for estimate in (both.a, both.b)]
    change = {c: peaks[1].get(c, 0) - peaks[0].get(c, 0) for c in {**peaks[0], **peaks[1]}}
    largest = sorted(change, key=lambda c: -abs(change[c]))[:3]
    return ", ".join(
        f"{'+' if change[c] > 0 else '-'}{human_bytes(abs(change[c]))} {c}"
        for c in largest
        if abs(change[c]) > _LEAST * both.a.peak_bytes
    )
