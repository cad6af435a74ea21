"""An estimate for people (plain text) and for programs (plain data)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graphshard.inspect.fold import fold
from graphshard.inspect.units_text import human_bytes

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate, UnitEstimate

_SENTENCES = 6


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
                "reason": transfer.reason,
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
    hidden = estimate.communication_seconds - estimate.exposed_seconds
    yield (
        f"step       {seconds(estimate.step_seconds)}: compute "
        f"{seconds(estimate.compute_seconds)} (optimizer {seconds(estimate.optimizer_seconds)}), "
        f"exposed communication {seconds(estimate.exposed_seconds)}, "
        f"hidden {seconds(max(0.0, hidden))}"
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
    yield from _table(("held", "at the peak", "between steps"), rows)
    largest = [s for s in estimate.memory.holders[:3] if s.size]
    if largest:
        named = ", ".join(
            f"{human_bytes(s.size)} by {s.node.name} of {s.unit or '(root)'}" for s in largest
        )
        yield f"largest at the peak: {named}"


class _UnitFacts(NamedTuple):
    compute: str
    communication: str
    exposed: str
    held: str


def _units(estimate: Estimate) -> Iterator[str]:
    lines = fold([(unit.fqn, _facts(unit)) for unit in estimate.units])
    rows = [(line.name or "(root)", f"{line.count:,}", *line.facts) for line in lines]
    heading = ("unit", "units", "compute", "communication", "exposed", "held at the peak")
    yield from _table(heading, rows)


def _facts(unit: UnitEstimate) -> _UnitFacts:
    return _UnitFacts(
        seconds(unit.compute),
        seconds(unit.communication),
        seconds(unit.exposed),
        human_bytes(sum(unit.at_peak.values())),
    )


def _exposed(estimate: Estimate) -> Iterator[str]:
    """The worst collectives, alike ones once, and why each is exposed."""
    total = estimate.exposed_seconds
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for transfer in estimate.transfers:
        if transfer.exposed > 0.002 * estimate.step_seconds:
            key = (transfer.op, transfer.span.phase, transfer.reason)
            groups.setdefault(key, []).append(transfer)
    worst = sorted(groups.items(), key=lambda item: -sum(t.exposed for t in item[1]))
    if worst:
        yield ""
        yield f"why {seconds(total)} of communication are exposed:"
    for (op, phase, reason), alike in worst[:_SENTENCES]:
        units = alike[0].span.unit or "(root)"
        if len(alike) > 1:
            units += f" and {len(alike) - 1} more"
        lost = seconds(sum(transfer.exposed for transfer in alike))
        yield f"  {lost} in {phase}: {op} of {units}: {reason}"


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    yield line(heading)
    yield "-" * len(line(heading))
    yield from map(line, rows)


def seconds(value: float) -> str:
    """A duration with three digits: "1.23 s", "45.6 ms", "789 us"."""
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"
