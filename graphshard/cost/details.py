"""An estimate as plain data, with details everything that happens in its step; and as a trace.

Tables with many rows are dicts of columns. Places number the nodes of the program from 0 on; the
place after the last node stands for the optimizer's update. The node at a place runs from the time
that compute passed the node before it to `nodes["at"]`; while it runs, the storages are alive that
were born at its place or before, and that die there or later.

A trace has one row per stream, and a counter of live memory by category. It is in Chrome's "Trace
Event Format", for Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.memory import CATEGORIES
from graphshard.cost.text import causes_of
from graphshard.program.storages import END
from graphshard.program.text import full_text

OUTLIVES = -1
"""The place of death of a storage that outlives the step, in plain data."""


_SPAN = ("stream", "name", "unit", "phase", "issued", "start", "end", "place")


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


def details_dict(estimate: Estimate) -> dict[str, Any]:
    """The plan, the dump, and the tables of `estimate`; times in seconds, sizes in bytes."""
    return {
        "plan": estimate.plan.to_dict(),
        "dump": full_text(estimate.program),
        "nodes": _nodes(estimate),
        "spans": {
            name: [getattr(span, name) for span in estimate.timeline.spans] for name in _SPAN
        },
        "timeline_seconds": estimate.timeline.seconds,
        "step_overhead": estimate.hardware.step_overhead,
        "memory": _memory(estimate),
        "storages": _storages(estimate),
    }


def start_of(place: int, at: Sequence[float], end: float) -> float:
    """Seconds after which the node at `place` starts to run, or the update behind all nodes.

    at: by place, when compute has passed the node. end: when the update begins.
    """
    if place >= len(at):
        return end
    return at[place - 1] if place else 0.0


def _nodes(estimate: Estimate) -> dict[str, list[Any]]:
    """By place: name, module, unit, phase, line of the user's code, and when compute passed it."""
    nodes = list(estimate.program.graph.nodes)
    lines = (node.meta.get("line") for node in nodes)
    return {
        "name": [node.name for node in nodes],
        "module": [str(node.meta.get("fqn", "")) for node in nodes],
        "unit": [str(node.meta.get("unit", "")) for node in nodes],
        "phase": [str(node.meta.get("phase", "")) for node in nodes],
        "line": ["" if line is None else f"{line[0]}:{line[1]} in {line[2]}" for line in lines],
        "at": list(estimate.timeline.at),
    }


def _memory(estimate: Estimate) -> dict[str, Any]:
    """The points of the memory curve: their places and times, and bytes of each category."""
    points, timeline = estimate.memory.points, estimate.timeline
    named = {name for point in points for name, size in point.by_category.items() if size}
    order = [*CATEGORIES, *sorted(named.difference(CATEGORIES))]
    return {
        "place": [point.place for point in points],
        "seconds": [start_of(point.place, timeline.at, timeline.seconds) for point in points],
        "bytes": {
            name: [point.by_category.get(name, 0) for point in points]
            for name in order
            if name in named
        },
        "peak": estimate.memory.points.index(estimate.memory.peak),
    }


def _storages(estimate: Estimate) -> dict[str, list[Any]]:
    place = {node: index for index, node in enumerate(estimate.program.graph.nodes)}
    storages = [storage for storage in estimate.memory.storages if storage.size]
    return {
        "node": [place[storage.node] for storage in storages],
        "bytes": [storage.size for storage in storages],
        "category": [storage.kind for storage in storages],
        "born": [storage.born for storage in storages],
        "dies": [OUTLIVES if storage.dies >= END else storage.dies for storage in storages],
    }


# -- as a trace ------------------------------------------------------------------------------------


_MICROSECONDS = 1e6  # in a second


def write_trace(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Write the events of `estimate` as JSON."""
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(estimate))}
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def _events(estimate: Estimate) -> Iterator[dict[str, Any]]:
    timeline = estimate.timeline
    streams = {span.stream: None for span in timeline.spans}
    numbers = {name: number for number, name in enumerate(streams)}
    yield _name_event("process_name", f"predicted step on {estimate.hardware.name}", 0)
    for name, number in numbers.items():
        yield _name_event("thread_name", name, number)
    details = {transfer.span: transfer for transfer in timeline.transfers}
    for span in timeline.spans:
        transfer = details.get(span)
        args: dict[str, Any] = {"unit": span.unit or "(root)", "phase": span.phase}
        if transfer is not None:
            args |= {
                "bytes": transfer.bytes,
                "ranks": transfer.ranks,
                "exposed_us": transfer.exposed * _MICROSECONDS,
                "reason": estimate.why(transfer),
            }
        yield {
            "name": f"{span.name} {span.unit or '(root)'}",
            "cat": span.phase,
            "ph": "X",
            "pid": 0,
            "tid": numbers[span.stream],
            "ts": span.start * _MICROSECONDS,
            "dur": span.seconds * _MICROSECONDS,
            "args": args,
        }
    for at, by_category in memory_steps(estimate):
        counts = {name: size for name, size in by_category.items() if size}
        yield {"name": "live bytes", "ph": "C", "pid": 0, "ts": at * _MICROSECONDS, "args": counts}


def memory_steps(estimate: Estimate) -> Iterator[tuple[float, dict[str, int]]]:
    """The times in seconds at which live bytes change, with the new bytes by category."""
    at = estimate.timeline.at
    for point in estimate.memory.points:
        seconds = at[point.place] if point.place < len(at) else estimate.timeline.seconds
        yield seconds, dict(point.by_category)


def _name_event(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
