"""Compare two estimates: their differences, and the reasons for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.reasons import Cause
from graphshard.cost.text import MIN_SHARE, causes_of, range_text, speed_text
from graphshard.errors import CostError
from graphshard.format import human_bytes, human_seconds, sentence, table

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Comparison:
    """Two estimates of a step under two names."""

    a: Estimate
    b: Estimate
    names: tuple[str, str] = ("A", "B")

    @property
    def faster_by(self) -> float:
        """Seconds by which a step of `b` is shorter than one of `a`; negative if it is longer."""
        return self.a.step_seconds - self.b.step_seconds

    @property
    def apart(self) -> bool:
        """Whether the times differ by more than the predictions may be wrong.

        Two policies on one machine share most of the error; estimates of different machines, ranks
        or models do not, and their ranges must not overlap.
        """
        a, b = self.a, self.b
        if a.hardware == b.hardware and a.plan.world_size == b.plan.world_size:
            least = a.hardware.pair_spread * min(a.step_seconds, b.step_seconds)
            return abs(self.faster_by) > least
        one, other = a.step_range, b.step_range
        return one.high < other.low or other.high < one.low

    @property
    def smaller_by(self) -> int:
        """Bytes by which the peak of `b` is below that of `a`; negative if it is above."""
        return self.a.peak_bytes - self.b.peak_bytes

    @cached_property
    def policy_differences(self) -> Mapping[str, tuple[str, str]]:
        """Policy fields with different values, as text; "" where a policy lacks the field."""
        fields = []
        for estimate in (self.a, self.b):
            policy = estimate.plan.policy
            options = {"policy": type(policy).__name__} | policy.own_options()
            fields.append(options | policy.shared_options())
        one, other = fields
        return {
            name: (one.get(name, ""), other.get(name, ""))
            for name in {**one, **other}
            if one.get(name, "") != other.get(name, "")
        }

    @cached_property
    def causes(self) -> tuple[Mapping[tuple[str, str, str], Cause], ...]:
        """The causes of exposed communication of each estimate, by op, phase and reason kind."""
        return tuple(map(causes_of, (self.a, self.b)))

    def to_dict(self) -> dict[str, Any]:
        """Both estimates and the differences of their policies as plain data, ready for JSON."""
        return {
            "names": list(self.names),
            "estimates": [self.a.to_dict(), self.b.to_dict()],
            "apart": self.apart,
            "policies": {name: list(pair) for name, pair in self.policy_differences.items()},
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                *_head(self),
                "",
                *table(("", *self.names, "difference"), list(_rows(self))),
                *_differences(self),
            ]
        )

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


def compare(a: Estimate, b: Estimate, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two estimates, for example of one model under two policies.

    Args:
        a: an estimate from `graphshard.simulate`, the baseline.
        b: another estimate; the differences are those of `b` relative to `a`.
        names: the names of `a` and `b` in texts.

    Raises:
        CostError: an argument is not an estimate, or both names are equal.
    """
    for estimate in (a, b):
        if not isinstance(estimate, Estimate):
            raise CostError(
                "compare takes two estimates, as graphshard.simulate returns them; got a "
                f"{type(estimate).__name__}"
            )
    if len(set(names)) != 2:
        raise CostError(f"two estimates are compared under two names; got {names!r}")
    first, second = names
    return Comparison(a, b, (first, second))


# -- as text -------------------------------------------------------------------------------------

_MAX_DIFFERENCES = 5


_SAME = 0.0005  # a relative difference below this would round to zero


def _head(both: Comparison) -> Iterator[str]:
    a, b = both.a, both.b
    model = a.plan.units[0].module_class
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
        if name == "step" and a.hardware.spread != (1.0, 1.0):
            yield "  expected", range_text(a), range_text(b), "" if both.apart else "not apart"
    yield _row("TFLOP/s per device", a.tflops_per_gpu, b.tflops_per_gpu, speed_text)
    yield "MFU", f"{a.mfu:.1%}", f"{b.mfu:.1%}", ""
    yield _row("peak memory", a.peak_bytes, b.peak_bytes, human_bytes)
    peaks = [estimate.memory.peak.by_category for estimate in (a, b)]
    for category in sorted({**peaks[0], **peaks[1]}, key=lambda c: -peaks[0].get(c, 0)):
        one, other = (peak.get(category, 0) for peak in peaks)
        if one or other:
            yield _row(f"  {category}", one, other, human_bytes)
    if (a.reserved_bytes, b.reserved_bytes) != (a.peak_bytes, b.peak_bytes):
        yield _row("reserved", a.reserved_bytes, b.reserved_bytes, human_bytes)
    yield _row("between steps", a.valley_bytes, b.valley_bytes, human_bytes)
    yield _row("units", len(a.plan.units), len(b.plan.units), lambda v: f"{v:,.0f}")
    (counts_a, sizes_a), (counts_b, sizes_b) = _transfer_totals(a), _transfer_totals(b)
    for op in {**counts_a, **counts_b}:
        yield _row(op, counts_a[op], counts_b[op], lambda v: f"{v:,.0f}")
        yield _row("  bytes", sizes_a[op], sizes_b[op], human_bytes)


def _row(name: str, one: float, other: float, as_text: Callable[[float], str]) -> Row:
    return name, as_text(one), as_text(other), _change(one, other)


def _change(one: float, other: float) -> str:
    if abs(one - other) < _SAME * one or one == other:
        return "same"
    if not one:
        return "new"
    if not other:
        return "gone"
    return f"{other / one - 1:+.1%}"


def _differences(both: Comparison) -> Iterator[str]:
    a, b = both.a, both.b
    first, second = both.names
    gained, least = both.faster_by, MIN_SHARE * max(a.step_seconds, b.step_seconds)
    yield ""
    if abs(gained) <= least:
        yield f"{second} is as fast as {first}."
    else:
        than = "faster" if gained > 0 else "slower"
        share = abs(gained) / a.step_seconds
        found = f"{second} is {share:.1%} {than} than {first}, by {human_seconds(abs(gained))}"
        if not both.apart:
            found += ", which is within the error of predictions: the two cannot be told apart"
        yield sentence(f"{found}:")
    yield from _reasons(both, least)
    saved = both.smaller_by
    if abs(saved) > MIN_SHARE * a.peak_bytes:
        than = "below" if saved > 0 else "above"
        categories = _categories(both)
        yield sentence(
            f"{second}'s peak is {human_bytes(abs(saved))} {than} {first}'s: {categories}"
        )
    for name, estimate in zip(both.names, (a, b), strict=True):
        if not estimate.fits:
            yield (
                f"{name} does not fit in the {human_bytes(estimate.hardware.memory_bytes)} of "
                f"{estimate.hardware.name}"
            )


def _reasons(both: Comparison, least: float) -> Iterator[str]:
    """Why one of the two is faster; what takes no more than `least` seconds is summed."""
    a, b = both.a, both.b
    compute = a.compute_seconds - b.compute_seconds
    rest, more = both.faster_by, 0
    if abs(compute) > least:
        rest -= compute
        of_a, of_b = (e.timeline.recomputed_flops / max(1, e.flops) for e in (a, b))
        text = f": {of_b:.0%} of its FLOPs are recomputation, against {of_a:.0%}"
        text = "" if of_a == of_b else text
        yield f"  {human_seconds(abs(compute))} {_more(compute)} compute{text}"
    keys = {**both.causes[0], **both.causes[1]}
    changes = []
    for key in keys:
        one, other = (causes.get(key) for causes in both.causes)
        change = (one.seconds if one else 0.0) - (other.seconds if other else 0.0)
        changes.append((change, one, other))
    changes.sort(key=lambda entry: -abs(entry[0]))
    for place, (change, one, other) in enumerate(changes):
        if abs(change) <= least or place >= _MAX_DIFFERENCES:
            more += 1
            continue
        rest -= change
        reason = _difference_text(both, one, other)
        yield sentence(f"{human_seconds(abs(change))} {_more(change)} waiting: {reason}", "  ")
    if abs(rest) > least and more:
        yield f"  {human_seconds(abs(rest))} {_more(rest)}: {more} more"


def _more(gained: float) -> str:
    return "less" if gained > 0 else "more"


def _difference_text(both: Comparison, one: Cause | None, other: Cause | None) -> str:
    """The waits of both estimates for one kind of reason, explained by the longer one."""
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
    """The categories whose bytes at the peak differ most."""
    peaks = [estimate.memory.peak.by_category for estimate in (both.a, both.b)]
    change = {c: peaks[1].get(c, 0) - peaks[0].get(c, 0) for c in {**peaks[0], **peaks[1]}}
    largest = sorted(change, key=lambda c: -abs(change[c]))[:3]
    return ", ".join(
        f"{'+' if change[c] > 0 else '-'}{human_bytes(abs(change[c]))} {c}"
        for c in largest
        if abs(change[c]) > MIN_SHARE * both.a.peak_bytes
    )


def _transfer_totals(estimate: Estimate) -> tuple[Counter[str], Counter[str]]:
    """By op, the number of collectives and copies, and the bytes of their full tensors."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for transfer in estimate.transfers:
        counts[transfer.op] += 1
        sizes[transfer.op] += transfer.bytes
    return counts, sizes
