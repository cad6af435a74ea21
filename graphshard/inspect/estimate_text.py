"""An estimate for people (plain text) and for programs (plain data)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from graphshard.cost.compare import causes_of
from graphshard.inspect.fold import fold
from graphshard.inspect.tables import sentence, table
from graphshard.inspect.units_text import human_bytes, human_seconds
from graphshard.step_memory import PARAMETERS

if TYPE_CHECKING:
    from graphshard.cost.by_unit import UnitEstimate
    from graphshard.cost.estimate import Estimate

_SENTENCES = 6
_LEAST = 0.002  # of the step, for a cause to be told


def estimate_text(estimate: Estimate) -> str:
    """The estimate as stable plain text: totals, memory at the peak, units, what is exposed."""
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
    """The estimate as plain data, ready for JSON: seconds and bytes."""
    return {
        "hardware": estimate.hardware.to_dict(),
        "optimizer": estimate.optimizer,
        "backend": "eager" if estimate.program.regions is None else "inductor",
        "step_seconds": estimate.step_seconds,
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
        "units": [
            {
                "fqn": unit.fqn,
                "compute_seconds": unit.compute,
                "communication_seconds": unit.communication,
                "exposed_seconds": unit.exposed,
                "at_peak": dict(unit.at_peak),
                "held": [vars(held) for held in unit.held],
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
            }
            for transfer in estimate.transfers
        ],
    }


def _head(estimate: Estimate) -> Iterator[str]:
    plan = estimate.plan
    model = plan.units[0].module_class
    mesh = " x ".join(map(str, plan.mesh_shape))
    yield f"estimate of {model}: one training step on {plan.world_size:,} ranks (mesh {mesh})"
    yield f"hardware   {estimate.hardware}"
    if estimate.program.regions is not None:
        regions = estimate.program.regions
        yield (
            f"compute    in {len(regions.forms):,} compiled regions: what is fused reads and "
            "writes once; memory as if operators ran one by one"
        )
    hidden = estimate.communication_seconds - estimate.exposed_seconds
    yield (
        f"step       {human_seconds(estimate.step_seconds)}: compute "
        f"{human_seconds(estimate.compute_seconds)} "
        f"(optimizer {human_seconds(estimate.optimizer_seconds)}), "
        f"exposed communication {human_seconds(estimate.exposed_seconds)}, "
        f"hidden {human_seconds(max(0.0, hidden))}"
    )
    yield (
        f"speed      {estimate.tflops_per_gpu:,.1f} TFLOP/s per device, "
        f"{estimate.mfu:.1%} of its peak (MFU)"
    )
    verdict = "fits in" if estimate.fits else "DOES NOT FIT in"
    host = f", {human_bytes(estimate.memory.host)} on the host" if estimate.memory.host else ""
    yield (
        f"memory     peak {human_bytes(estimate.peak_bytes)}, between steps "
        f"{human_bytes(estimate.valley_bytes)}{host}; {verdict} "
        f"{human_bytes(estimate.hardware.memory_bytes)}"
    )


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
    """What is to blame for exposed communication, causes of one kind together, the worst first."""
    causes = causes_of(estimate).values()
    worst = [cause for cause in causes if cause.seconds > _LEAST * estimate.step_seconds]
    if worst:
        yield ""
        yield f"why {human_seconds(estimate.exposed_seconds)} of communication are exposed:"
    for cause in worst[:_SENTENCES]:
        unit = cause.worst.span.unit or "(root)"
        many, share = unit, ""
        if cause.count > 1:
            many += f" and {cause.count - 1} more"
            share = f"; {human_seconds(cause.reason.seconds)} of it in {unit}"
        yield sentence(
            f"{human_seconds(cause.seconds)}: {cause.op} of {many} in {cause.phase}: "
            f"{cause.text}{share}",
            "  ",
        )
