"""Everything that happens in an estimated step, as plain data: nodes, spans, storages, memory.

Tables with many rows are dicts of columns. Places number the nodes of the program from 0 on; the
place after the last node stands for the optimizer's update. The node at a place runs from the time
that compute passed the node before it to `nodes["at"]`; while it runs, the storages are alive that
were born at its place or before, and that die there or later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from graphshard.cost.memory import CATEGORIES
from graphshard.program.storages import END
from graphshard.program.text import full_text

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate

OUTLIVES = -1
"""The place of death of a storage that outlives the step, in plain data."""


def details_dict(estimate: Estimate) -> dict[str, Any]:
    """The plan, the dump, and the tables of `estimate`; times in seconds, sizes in bytes."""
    return {
        "plan": estimate.plan.to_dict(),
        "dump": full_text(estimate.program),
        "nodes": _nodes(estimate),
        "spans": _columns(
            (
                "stream",
                "name",
                "unit",
                "phase",
                "issued",
                "start",
                "end",
                "place",
            ),
            estimate.timeline.spans,
        ),
        "timeline_seconds": estimate.timeline.seconds,
        "step_overhead": estimate.hardware.step_overhead,
        "memory": _memory(estimate),
        "storages": _storages(estimate),
    }


def start_of(place: int, at: Sequence[float], end: float) -> float:
    """Seconds after which the node at `place` starts to run.

    Args:
        place: of a node, or the number of nodes for the optimizer's update.
        at: by place, when compute has passed the node.
        end: when the update begins.
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


def _columns(names: Sequence[str], rows: Iterable[Any]) -> dict[str, list[Any]]:
    every = list(rows)
    return {name: [getattr(row, name) for row in every] for name in names}
