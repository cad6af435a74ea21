"""How many bytes are alive on a rank at every point of a training step, and what holds them.

The state between steps (shards, optimizer states, buffers, what the user holds of the batch) is
alive throughout. The step adds what its program allocates (see `storages`), then the reduced
gradients, then what the optimizer's update needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from graphshard.cost.buffers import BUFFERS, END, GRADIENTS, KEPT, buffers_of
from graphshard.errors import CostError
from graphshard.plan import ParamLayout, ShardingPlan
from graphshard.program import Program
from graphshard.step_memory import KINDS, Storage, bytes_of, storages_of

SHARDS = "shards"
OPTIMIZER = "optimizer"
STEP = "optimizer's step"
INPUTS = "inputs and buffers"
CATEGORIES = (SHARDS, *KINDS, BUFFERS, GRADIENTS, KEPT, OPTIMIZER, STEP, INPUTS)


@dataclass(frozen=True)
class OptimizerCost:
    """What an optimizer keeps and needs, in multiples of the shard's bytes."""

    states: float
    temporary: float


OPTIMIZERS: Mapping[str, OptimizerCost] = {
    "none": OptimizerCost(0, 0),
    "sgd": OptimizerCost(0, 0),
    "sgd-momentum": OptimizerCost(1, 0),
    # foreach implementations (torch's default on accelerators) hold one list of temporaries.
    "adamw": OptimizerCost(2, 1),
    "adamw-fused": OptimizerCost(2, 0),
}


@dataclass(frozen=True)
class Point:
    """The bytes alive once the node at `place` runs, by category."""

    place: int
    bytes: int
    by_category: Mapping[str, int]


@dataclass
class MemoryCurve:
    """Bytes alive over a step, on the device.

    peak: the point with the most. valley: bytes alive between steps. holders: the storages alive at
    the peak, largest first. points: one for every place where something is allocated or freed.
    storages: all that the step allocates.
    """

    valley: int
    valley_by_category: Mapping[str, int]
    peak: Point
    holders: tuple[Storage, ...]
    points: tuple[Point, ...]
    host: int = 0  # bytes kept on the host between steps
    by_unit: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # at the peak
    storages: tuple[Storage, ...] = ()


def memory_of(
    program: Program, plan: ShardingPlan, *, optimizer: str = "adamw", backend: str = "nccl"
) -> MemoryCurve:
    """The memory of a training step in which gradients are set to None after each step.

    Args:
        program: rewritten.
        plan: the plan it was rewritten by.
        optimizer: "adamw", "adamw-fused", "sgd", "sgd-momentum" or "none".
        backend: "nccl" or "gloo".

    Raises:
        CostError: the optimizer is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise CostError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {optimizer!r}")
    storages = [*storages_of(program).all, *buffers_of(program, backend)]
    resident, host = resident_bytes(program, plan, OPTIMIZERS[optimizer] if program.grad else None)
    at_rest = Point(0, sum(resident.values()), resident)
    points = [at_rest, *_walk(storages, resident)]
    after = Counter(resident)
    for storage in storages:
        if storage.dies >= END:
            after[storage.kind] += storage.size
    step = int(OPTIMIZERS[optimizer].temporary * after[GRADIENTS])
    if program.grad and step:
        after[STEP] += step
        points.append(Point(len(program.graph.nodes), sum(after.values()), dict(after)))
    peak = max(points, key=lambda point: point.bytes)
    alive = [s for s in storages if s.size and s.born <= peak.place <= s.dies]
    alive.sort(key=lambda storage: -storage.size)
    by_unit: dict[str, Counter[str]] = {}
    for storage in alive:
        by_unit.setdefault(storage.unit, Counter())[storage.kind] += storage.size
    return MemoryCurve(
        at_rest.bytes,
        resident,
        peak,
        tuple(alive),
        tuple(points),
        host,
        by_unit,
        tuple(storages),
    )


def _walk(storages: Iterable[Storage], resident: Mapping[str, int]) -> Iterator[Point]:
    events: list[tuple[int, int, Storage]] = []
    for storage in storages:
        if storage.size:
            # What a node's operands hold is given back once it has run, with its results there.
            events.append((storage.born, 1, storage))
            if storage.dies < END:
                events.append((storage.dies + 1, -1, storage))
    events.sort(key=lambda event: event[:2])
    live = Counter(resident)
    total = sum(live.values())
    for index, (place, sign, storage) in enumerate(events):
        live[storage.kind] += sign * storage.size
        total += sign * storage.size
        if index + 1 == len(events) or events[index + 1][0] != place:
            yield Point(place, total, dict(live))


def resident_bytes(
    program: Program, plan: ShardingPlan, optimizer: OptimizerCost | None
) -> tuple[dict[str, int], int]:
    """Bytes a rank holds between steps: on the device by category, and on the host."""
    layouts = {id(layout): layout for layout in plan.layouts.values()}.values()
    shards = sum(layout.shard_bytes for layout in layouts)
    trained = sum(_own_bytes(layout) for layout in layouts if layout.requires_grad)
    states = 0 if optimizer is None else int(optimizer.states * trained)
    ends = [entry.node for entry in program.buffers] + [entry.node for entry in program.inputs]
    held = sum(_bytes(node) for node in ends)
    if plan.policy.offloads("params"):
        return {INPUTS: held}, shards + states
    return {SHARDS: shards, OPTIMIZER: states, INPUTS: held}, 0


def _own_bytes(layout: ParamLayout) -> int:
    """The first rank's part without padding, which is what an optimizer keeps states of."""
    if not layout.sharded:
        return layout.numel * layout.dtype.itemsize
    start, stop = layout.rows(0)
    rest = prod(layout.shape) // max(1, layout.shape[0])
    return (stop - start) * rest * layout.dtype.itemsize


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return bytes_of(val) if isinstance(val, torch.Tensor) else 0
