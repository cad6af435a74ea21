"""Estimates as plain text, with what would make room in a step that does not fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import floor, log10

from graphshard.cost.estimate import Estimate, UnitEstimate
from graphshard.cost.kernel_rates import EFFICIENT, WITHOUT_MASKS
from graphshard.cost.memory import OPTIMIZER, OPTIMIZER_STEP, SHARD_GRADIENTS, SHARDS
from graphshard.cost.reasons import Cause, Reason
from graphshard.cost.reserved import ReservedMemory
from graphshard.cost.timeline import Transfer
from graphshard.format import fold, human_bytes, human_seconds, rest_of, sentence, table
from graphshard.planning.plan import padding_text
from graphshard.policy.strategy import Strategy
from graphshard.program.sizes import assumed_text
from graphshard.program.storages import AT_WORK, PARAMETERS, SAVED


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


_MAX_EXPOSED_LINES = 6


MIN_SHARE = 0.002  # a cause or difference is shown above this fraction of the step or peak


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
    yield from map(sentence, room_lines(estimate))
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
    held: Counter[str] = Counter()
    for storage in estimate.memory.holders:
        held[f"{storage.node.name} of {storage.unit or '(root)'}"] += storage.size
    if largest := [(name, size) for name, size in held.most_common(3) if size]:
        named = ", ".join(f"{human_bytes(size)} by {name}" for name, size in largest)
        yield sentence(f"largest at the peak: {named}")


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


def _facts(unit: UnitEstimate) -> tuple[str, ...]:
    return (
        human_seconds(unit.compute),
        human_seconds(unit.communication),
        human_seconds(unit.exposed),
        human_seconds(unit.seconds_held(PARAMETERS)),
        human_bytes(sum(unit.at_peak.values())),
    )


def _exposed(estimate: Estimate) -> Iterator[str]:
    """The causes of exposed communication, the longest first, and the sum of the others."""
    causes = [*causes_of(estimate).values()]
    shown = [cause for cause in causes if cause.seconds > MIN_SHARE * estimate.step_seconds]
    shown = shown[:_MAX_EXPOSED_LINES]
    if shown:
        yield ""
        yield f"why {human_seconds(estimate.exposed_seconds)} of communication are exposed:"
    for cause in shown:
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
    others = [cause.seconds for cause in causes if cause not in shown]
    if shown and others:
        rest = rest_of(estimate.exposed_seconds, [cause.seconds for cause in shown])
        yield f"  {human_seconds(rest)}: {len(others)} more"


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
    conf = f" with {reserved.settings}" if reserved.settings else ""
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


# -- what would make room --------------------------------------------------------------------------


def room(estimate: Estimate) -> dict[str, int]:
    """The most bytes of the peak that each change frees, the largest first.

    A change may free less, since another place of the step becomes the peak.
    """
    policy, ranks = estimate.plan.policy, estimate.plan.world_size
    strategy = Strategy(policy.strategy)
    held = estimate.memory.peak.by_category
    temporary = held.get(OPTIMIZER_STEP, 0)
    kept = sum(held.get(name, 0) for name in (SHARDS, SHARD_GRADIENTS, OPTIMIZER)) + temporary
    saved = held.get(SAVED, 0)
    found = {}
    if any(entry.node.meta["val"].shape[:1] > (1,) for entry in estimate.program.inputs):
        found["half the batch"] = (saved + held.get(AT_WORK, 0)) // 2
    if policy.recompute is None:
        found['recompute="units"'] = saved
    if not estimate.hardware.is_host:
        if not policy.offloads("activations"):
            found['offload="activations"'] = saved
        if not policy.offloads("params"):
            found['offload="params"'] = kept
    if estimate.optimizer == "adamw":
        found["a fused optimizer"] = temporary
    if strategy is Strategy.FULL_SHARD:
        found[f"{2 * ranks:,} ranks"] = kept // 2
    elif not strategy.hybrid:
        found['strategy="FULL_SHARD"'] = held.get(PARAMETERS, 0)
    return {name: size for name, size in sorted(found.items(), key=lambda one: -one[1]) if size}


def room_lines(estimate: Estimate) -> Iterator[str]:
    """One line on what would make room; none if the step fits."""
    if not estimate.fits:
        freed = [f"{human_bytes(size)} by {name}" for name, size in room(estimate).items()]
        yield f"room       frees at most {', '.join(freed)}; graphshard tune searches for what fits"
