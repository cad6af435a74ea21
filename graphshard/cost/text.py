"""Estimates and comparisons as plain text, and estimates as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from graphshard.cost.estimate import Estimate
from graphshard.cost.kernel_rates import EFFICIENT, WITHOUT_MASKS
from graphshard.cost.reasons import Cause, Reason
from graphshard.cost.timeline import Transfer
from graphshard.format import fold, human_bytes, human_seconds, sentence, table
from graphshard.planning.plan import padding_text
from graphshard.program.sizes import assumed_text
from graphshard.program.storages import PARAMETERS

if TYPE_CHECKING:
    from graphshard.cost.by_unit import UnitEstimate
    from graphshard.cost.compare import Comparison


from typing import TYPE_CHECKING

from graphshard.cost.reserved import ReservedMemory

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate


def causes_of(estimate: Estimate) -> dict[tuple[str, str, str], Cause]:
    """The causes of exposed communication, by op, phase and reason kind, the longest first."""
    by_kind: dict[tuple[str, str, str], list[tuple[Reason, Transfer]]] = defaultdict(list)
    for transfer in estimate.transfers:
        for reason in estimate.reasons(transfer):
            by_kind[transfer.op, transfer.span.phase, reason.kind].append((reason, transfer))
    causes = []
    for (op, phase, kind), pairs in by_kind.items():
        reason, worst = max(pairs, key=lambda pair: pair[0].seconds)
        seconds = sum(each.seconds for each, _ in pairs)
        causes.append(Cause(op, phase, kind, seconds, len(pairs), worst, reason))
    causes.sort(key=lambda cause: -cause.seconds)
    return {(cause.op, cause.phase, cause.kind): cause for cause in causes}


def transfer_totals(estimate: Estimate) -> tuple[Counter[str], Counter[str]]:
    """By op, the number of collectives and copies, and the bytes of their full tensors."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for transfer in estimate.transfers:
        counts[transfer.op] += 1
        sizes[transfer.op] += transfer.bytes
    return counts, sizes


_MAX_EXPOSED_LINES = 6


_MIN_SHARE = 0.002  # a cause or difference is shown above this fraction of the step or peak


def estimate_text(estimate: Estimate) -> str:
    """The estimate as stable text: totals, memory at the peak, units, exposed communication."""
    return "\n".join(
        [
            *_head(estimate),
            "",
            *_memory(estimate),
            "",
            *_units(estimate),
            *_exposed(estimate),
        ]
    )


def estimate_dict(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain data, ready for JSON; times in seconds, sizes in bytes."""
    number_of = {id(transfer): number for number, transfer in enumerate(estimate.transfers)}
    return {
        "hardware": estimate.hardware.to_dict(),
        "attention": ", ".join(estimate.attention_kernels),
        "runtime": estimate.runner.runtime,
        "leave_eager": sorted(estimate.runner.leave_eager),
        "holds_outputs": estimate.runner.holds_outputs,
        "optimizer": estimate.optimizer,
        "assumed_sizes": estimate.program.assumed_sizes,
        "backend": "eager" if estimate.program.regions is None else "inductor",
        "step_seconds": estimate.step_seconds,
        "step_range": list(estimate.step_range),
        "compute_seconds": estimate.compute_seconds,
        "communication_seconds": estimate.communication_seconds,
        "exposed_seconds": estimate.exposed_seconds,
        "optimizer_seconds": estimate.optimizer_seconds,
        "flops": estimate.flops,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "peak_bytes": estimate.peak_bytes,
        "peak_by_category": dict(estimate.memory.peak.by_category),
        "valley_bytes": estimate.valley_bytes,
        "valley_by_category": dict(estimate.memory.valley_by_category),
        "host_bytes": estimate.memory.host,
        "fits": estimate.fits,
        "reserved_bytes": estimate.reserved_bytes,
        "device_bytes": estimate.device_bytes,
        "overheads": None if estimate.overheads is None else asdict(estimate.overheads),
        "reserved": None if estimate.reserved is None else estimate.reserved.to_dict(),
        "units": [
            {
                "fqn": unit.fqn,
                "compute_seconds": unit.compute,
                "communication_seconds": unit.communication,
                "exposed_seconds": unit.exposed,
                "at_peak": dict(unit.at_peak),
                "held": [vars(period) for period in unit.held],
            }
            for unit in estimate.units
        ],
        "transfers": [
            {
                "op": transfer.op,
                "unit": transfer.span.unit,
                "phase": transfer.span.phase,
                "group": transfer.group,
                "ranks": transfer.ranks,
                "bytes": transfer.bytes,
                "seconds": transfer.span.seconds,
                "exposed_seconds": transfer.exposed,
                "reason": estimate.why(transfer),
                "place": transfer.span.place,
                "waited_at": transfer.waited_at,
                "waited_place": transfer.waited_place,
            }
            for transfer in estimate.transfers
        ],
        "causes": [
            {
                "op": cause.op,
                "phase": cause.phase,
                "kind": cause.kind,
                "seconds": cause.seconds,
                "count": cause.count,
                "worst_transfer": number_of[id(cause.worst)],
                "text": cause.text,
            }
            for cause in causes_of(estimate).values()
        ],
    }


def range_text(estimate: Estimate) -> str:
    """The range in which a step is expected, as text."""
    low, high = estimate.step_range
    return f"{human_seconds(low)} to {human_seconds(high)}"


def speed_text(tflops: float) -> str:
    """TFLOP/s as text, with a digit behind the point, and below ten with three digits in all."""
    if not tflops or tflops >= 10:
        return f"{tflops:,.1f}" if tflops else "0"
    return f"{tflops:.{2 - floor(log10(tflops))}f}"


def _head(estimate: Estimate) -> Iterator[str]:
    plan = estimate.plan
    model = plan.units[0].module_class
    mesh = " x ".join(map(str, plan.mesh_shape))
    yield f"estimate of {model}: one training step on {plan.world_size:,} ranks (mesh {mesh})"
    yield f"hardware   {estimate.hardware}"
    if kernels := _kernels(estimate):
        yield f"kernels    {kernels}"
    if estimate.program.regions is not None:
        regions = estimate.program.regions
        yield (
            f"compute    in {len(regions.forms):,} compiled regions: what is fused reads and "
            "writes once, and is in memory only where others read it"
        )
    if assumed := estimate.program.assumed_sizes:
        yield f"sizes      {assumed_text(assumed)}"
    hidden = estimate.communication_seconds - estimate.exposed_seconds
    yield (
        f"step       {human_seconds(estimate.step_seconds)}: compute "
        f"{human_seconds(estimate.compute_seconds)} "
        f"(optimizer {human_seconds(estimate.optimizer_seconds)}), "
        f"exposed communication {human_seconds(estimate.exposed_seconds)}, "
        f"hidden {human_seconds(max(0.0, hidden))}"
    )
    if estimate.hardware.spread != (1.0, 1.0):
        yield f"expected   {range_text(estimate)} a step"
    yield (
        f"speed      {speed_text(estimate.tflops_per_gpu)} TFLOP/s per device, "
        f"{estimate.mfu:.1%} of its peak (MFU)"
    )
    host = f", {human_bytes(estimate.memory.host)} on the host" if estimate.memory.host else ""
    verdict = (
        f"{'fits in' if estimate.fits else 'DOES NOT FIT in'} "
        f"{human_bytes(estimate.hardware.memory_bytes)}"
    )
    yield (
        f"memory     peak {human_bytes(estimate.peak_bytes)}, between steps "
        f"{human_bytes(estimate.valley_bytes)}{host}; {verdict}"
    )
    if not estimate.fits and (padding := padding_text(estimate.plan)) is not None:
        yield f"padding    {padding}"
    yield from device_lines(estimate)


def _kernels(estimate: Estimate) -> str:
    """What is assumed of the machine's kernels, as text; "" if nothing is."""
    hardware, runner = estimate.hardware, estimate.runner
    parts = []
    if attention := _attention(estimate):
        parts.append(attention)
    if hardware.power_limit:
        parts.append(f"power limited to {hardware.power_limit:g} of {hardware.tdp_watts:g} W")
    if runner.copies_gathers:
        parts.append("gathers copied out, as fsdp2 does")
    if runner.leave_eager and estimate.program.regions is not None:
        units = ", ".join(sorted(unit or "(root)" for unit in runner.leave_eager))
        parts.append(f"not compiled: {units}")
    if runner.holds_outputs:
        parts.append("outputs held until the next call returns")
    return "; ".join(parts)


def _attention(estimate: Estimate) -> str:
    """The attention kernels by whose rates the step is priced, as text; "" without any."""
    plain, masked = (
        sorted(kernel for kernel, has_mask in estimate.attention_calls if has_mask is wanted)
        for wanted in (False, True)
    )
    parts = [f"by {' and '.join(plain)}"] if plain else []
    if masked and masked != plain:
        flash = estimate.hardware.attention in WITHOUT_MASKS and EFFICIENT in masked
        none = ", as flash attention takes none" if flash else ""
        parts.append(f"with a mask by {' and '.join(masked)}{none}")
    return f"attention {', '.join(parts)}" if parts else ""


def _memory(estimate: Estimate) -> Iterator[str]:
    peak, valley = estimate.memory.peak, estimate.memory.valley_by_category
    categories = sorted(peak.by_category, key=lambda name: -peak.by_category[name])
    shown = [name for name in categories if peak.by_category[name] or valley.get(name)]
    rows = [
        (name, human_bytes(peak.by_category[name]), human_bytes(valley.get(name, 0)))
        for name in shown
    ]
    yield from table(("held", "at the peak", "between steps"), rows)
    largest = [s for s in estimate.memory.holders[:3] if s.size]
    if largest:
        named = ", ".join(
            f"{human_bytes(s.size)} by {s.node.name} of {s.unit or '(root)'}" for s in largest
        )
        yield sentence(f"largest at the peak: {named}")


class _UnitFacts(NamedTuple):
    compute: str
    communication: str
    exposed: str
    unsharded: str
    held: str


def _units(estimate: Estimate) -> Iterator[str]:
    lines = fold([(unit.fqn, _facts(unit)) for unit in estimate.units])
    rows = [(line.name or "(root)", f"{line.count:,}", *line.facts) for line in lines]
    heading = (
        "unit",
        "units",
        "compute",
        "communication",
        "exposed",
        "unsharded for",
        "held at the peak",
    )
    yield from table(heading, rows)


def _facts(unit: UnitEstimate) -> _UnitFacts:
    return _UnitFacts(
        human_seconds(unit.compute),
        human_seconds(unit.communication),
        human_seconds(unit.exposed),
        human_seconds(unit.seconds_held(PARAMETERS)),
        human_bytes(sum(unit.at_peak.values())),
    )


def _exposed(estimate: Estimate) -> Iterator[str]:
    """The causes of exposed communication, the longest first."""
    causes = causes_of(estimate).values()
    shown = [cause for cause in causes if cause.seconds > _MIN_SHARE * estimate.step_seconds]
    if shown:
        yield ""
        yield f"why {human_seconds(estimate.exposed_seconds)} of communication are exposed:"
    for cause in shown[:_MAX_EXPOSED_LINES]:
        unit = cause.worst.span.unit or "(root)"
        units, share = unit, ""
        if cause.count > 1:
            units += f" and {cause.count - 1} more"
            share = f"; {human_seconds(cause.reason.seconds)} of it in {unit}"
        yield sentence(
            f"{human_seconds(cause.seconds)}: {cause.op} of {units} in {cause.phase}: "
            f"{cause.text}{share}",
            "  ",
        )


_MAX_DIFFERENCES = 5


_SAME = 0.0005  # a relative difference below this would round to zero


def compare_text(both: Comparison) -> str:
    """The differences between two estimates: policies, numbers, and reasons."""
    return "\n".join(
        [
            *_compared_head(both),
            "",
            *table(("", *both.names, "difference"), list(_rows(both))),
            *_differences(both),
        ]
    )


def _compared_head(both: Comparison) -> Iterator[str]:
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
    (counts_a, sizes_a), (counts_b, sizes_b) = transfer_totals(a), transfer_totals(b)
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
    """The largest differences in time and memory, with their reasons."""
    a, b = both.a, both.b
    first, second = both.names
    gained, least = both.faster_by, _MIN_SHARE * max(a.step_seconds, b.step_seconds)
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
    for change, one, other in changes[:_MAX_DIFFERENCES]:
        if abs(change) > least:
            reason = _difference_text(both, one, other)
            yield sentence(f"{human_seconds(abs(change))} {_more(change)} waiting: {reason}", "  ")
    saved = both.smaller_by
    if abs(saved) > _MIN_SHARE * a.peak_bytes:
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


def _more(gained: float) -> str:
    return "less" if gained > 0 else "more"


def _recomputed(both: Comparison) -> str:
    one, other = (e.timeline.recomputed_flops / max(1, e.flops) for e in (both.a, both.b))
    return (
        "" if one == other else f": {other:.0%} of its FLOPs are recomputation, against {one:.0%}"
    )


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
        if abs(change[c]) > _MIN_SHARE * both.a.peak_bytes
    )


_MIN_FREE_SHARE = 0.02  # of what is reserved, for a segment's free bytes to be shown

_MOST = 3


def device_lines(estimate: Estimate) -> Iterator[str]:
    """Lines on the bytes of the device and of the allocator; none on hosts."""
    overheads = estimate.overheads
    if overheads is None:
        return
    outside = [("CUDA context", overheads.context), ("NCCL", overheads.communicators)]
    outside.append(("driver", overheads.driver))
    shown = ", ".join(f"{name} {human_bytes(size)}" for name, size in outside if size)
    yield sentence(
        f"device     {human_bytes(estimate.device_bytes)}: reserved "
        f"{human_bytes(estimate.reserved_bytes)}, {shown}"
    )
    if estimate.reserved is not None:
        workspaces = sum(overheads.workspaces)
        yield from (sentence(line) for line in _reserved(estimate.reserved, workspaces))


def _reserved(reserved: ReservedMemory, workspaces: int) -> Iterator[str]:
    usage = reserved.usage
    parts = [
        ("tensors at their peak", usage.live - workspaces),
        ("cuBLAS workspaces", workspaces),
        ("rounding", usage.rounding),
        ("holes between tensors", usage.holes),
        ("segments without tensors", usage.unused),
    ]
    shown = ", ".join(f"{human_bytes(size)} {name}" for name, size in parts if size)
    conf = f" with {reserved.settings}" if str(reserved.settings) else ""
    yield f"reserved   {human_bytes(reserved.bytes)}{conf}: {shown}"
    least = _MIN_FREE_SHARE * reserved.bytes
    for segment in [s for s in usage.largest if s.free > least][:_MOST]:
        held = f", beside {segment.holders[0]}" if segment.holders else ""
        yield (
            f"  {human_bytes(segment.free)} free in a segment of {human_bytes(segment.size)}"
            f" ({segment.stream}): the largest hole {human_bytes(segment.largest)}{held}"
        )
    if reserved.retries:
        yield (
            f"  the device is full {reserved.retries:,} times in {reserved.steps} steps: then free "
            "segments go back to it, and compute waits"
        )
    if reserved.failed:
        yield f"  no room for {reserved.failed}"
