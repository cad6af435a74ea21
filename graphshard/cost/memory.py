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
from types import EllipsisType

import torch
from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.errors import CostError
from graphshard.planning.layout import ParamLayout
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops, packing
from graphshard.program.aliases import unpacks, uses_of
from graphshard.program.annotations import Budget
from graphshard.program.collective import Collective, operands_of, wait_of
from graphshard.program.program import Program
from graphshard.program.sizes import is_contiguous
from graphshard.program.storages import (
    END,
    KINDS,
    Storage,
    bytes_of,
    changes,
    node_bytes,
    storages_of,
)


def bytes_held(program: Program, plan: ShardingPlan, of_policy: bool, backend: str) -> int:
    """The most bytes a finished `program` holds at once; see `Budget.bytes`."""
    if of_policy:
        return max(storages_of(program).live(), default=0)
    memory = memory_of(program, plan, optimizer="none", backend=backend)
    return memory.peak.bytes - memory.valley


def held_by_place(program: Program, plan: ShardingPlan, budget: Budget) -> list[int]:
    """By place of a node, the bytes a finished program holds there that count in `budget`."""
    if budget.of_policy:
        return storages_of(program).live()
    memory = memory_of(program, plan, optimizer="none", backend=budget.backend)
    points = iter([*memory.points[1:], None])
    held, point, here = [], next(points), memory.valley
    for place in range(len(program.graph.nodes)):
        while point is not None and point.place <= place:
            here, point = point.bytes, next(points)
        held.append(here - memory.valley)
    return held


BUFFERS = "communication buffers"


GRADIENTS = "gradients"


KEPT = "gradients kept by no_sync"


def buffers_of(program: Program, backend: str) -> Iterator[Storage]:
    """Storages of collectives and of gradients reduced or kept, in the order they are made."""
    make = _Maker({node: index for index, node in enumerate(program.graph.nodes)})
    returned = {grad for grad in program.results().grads if grad is not None}
    for node in program.nodes():
        if node.target in ops.REDUCES:
            yield from _of_reduce(node, program, backend, make, returned)
        elif node.target is ops.all_gather:
            yield from _of_gather(node, program, backend, make)
        elif node.target is ops.keep:
            yield make(node, node_bytes(node), KEPT, ends=())
        elif ops.is_transfer(node):
            size = node_bytes(node)
            if node.target is ops.add_kept:
                # Added in place to what an earlier backward kept, which counts on as the sum.
                yield make(node, size, KEPT, first=None, ends=[node], over=-1)
            if ops.origin(node) is node or not _is_reduced(node):
                continue
            if node.target is ops.arrive or _on_host(node):
                continue
            stays = node in returned
            ends = () if stays else uses_of(node)
            yield make(node, size, GRADIENTS if stays else BUFFERS, ends=ends)


@dataclass(frozen=True)
class _Maker:
    """Makes storages that live between some nodes, in the order in which those stand now."""

    place: Mapping[fx.Node, int]

    def __call__(
        self,
        node: fx.Node,
        size: int,
        kind: str,
        *,
        first: fx.Node | EllipsisType | None = ...,
        late: int = 0,
        ends: Iterable[fx.Node],
        over: int = 0,
    ) -> Storage:
        first = node if first is ... else first
        last = list(ends)
        born = (0 if first is None else self.place[first]) + late
        dies = max((self.place[end] for end in last), default=END - over) + over
        return Storage(node, size, born, dies, kind, first=first, late=late, ends=last, over=over)


def _of_gather(node: fx.Node, program: Program, backend: str, make: _Maker) -> Iterator[Storage]:
    """Small shards travel in one message: a copy of them, and what it is received in."""
    ranks = ranks_of(node, program)
    shards = [operand.meta["val"] for operand in operands_of(node)]
    moved = sum(_packed(shards, [bytes_of(s) for s in shards], packing.GATHER_BELOW[backend]))
    if moved and ranks > 1:
        wait = wait_of(node)
        assert wait is not None
        yield make(node, moved * (1 + ranks), BUFFERS, ends=[wait])


def _of_reduce(
    node: fx.Node, program: Program, backend: str, make: _Maker, returned: set[fx.Node]
) -> Iterator[Storage]:
    wait = wait_of(node)
    assert wait is not None
    results = wait.meta["val"]
    ranks = ranks_of(node, program)
    op = ops.OPS[node.target]
    scattered = op.moves == "reduce_scatter" and ranks > 1
    exchanged = scattered and backend == "gloo" and ranks > 2
    given = sum(map(bytes_of, results))
    first, late = node, 0
    if scattered:
        copied, longer = _sent(node, [bytes_of(r) * ranks for r in results], backend)
        if copied:  # what it was copied from is gone once the reduce is launched
            yield make(node, copied, BUFFERS, ends=[node])
        if longer:
            yield make(node, longer, BUFFERS, late=1, ends=[wait])
        if exchanged:
            yield make(node, given * ranks, BUFFERS, ends=[wait])
            first = wait
        elif backend == "gloo":
            halves = [bytes_of(r) for r in results if r.dtype is torch.float16]
            if halves:  # added up in float32
                yield make(wait, 2 * max(halves), BUFFERS, ends=[wait])
    elif op.scatters and ranks > 1:
        # A copy of the full gradients is reduced in place; each rank copies its shards out of it.
        yield make(node, given * ranks, BUFFERS, ends=[node])
        first = wait
    else:
        # The copy that is reduced in place, and handed out, outlives what it was copied from.
        yield make(node, given, BUFFERS, ends=[node])
        first, late = wait, 1
    unpacked = unpacks(wait)
    stays = any(user in returned for user in unpacked)
    ends = [] if stays else uses_of(*unpacked) or [wait]
    kind = GRADIENTS if stays else BUFFERS
    yield make(node, given, kind, first=first, late=late, ends=ends)


def _sent(node: fx.Node, whole: list[int], backend: str) -> tuple[int, int]:
    """Bytes of the copies that are made of the operands of a reduce_scatter, and of how much more
    is sent than they hold; `whole` is what is sent of each.

    Gradients are padded, put into the order of the ranks, and packed into one message if small.
    """
    operands = [operand.meta["val"] for operand in operands_of(node)]
    dims = Collective.of(node).dims
    copied = longer = 0
    for operand, dim, size in zip(operands, dims, whole, strict=True):
        if dim or size != bytes_of(operand) or not is_contiguous(operand):
            copied += size
            longer += size - bytes_of(operand)
    packed = _packed(operands, whole, packing.REDUCE_BELOW[backend])
    divided = [
        size
        for operand, size in zip(operands, whole, strict=True)
        if operand.dtype is torch.float16 and backend != "gloo"
    ]
    return copied + sum(packed) + sum(divided), longer


def _packed(tensors: list[torch.Tensor], sizes: list[int], below: int) -> list[int]:
    """Of the bytes `sizes` of some tensors, those that travel in a message with others."""
    messages = packing.packed(sizes, [tensor.dtype for tensor in tensors], below)
    return [sizes[i] for indices in messages for i in indices]


def _is_reduced(node: fx.Node) -> bool:
    origin = ops.origin(node)
    return ops.is_unpack(origin) and ops.collective_of(origin).target in ops.REDUCES


def _on_host(node: fx.Node) -> bool:
    """Whether `node`, or what it was made from, was copied to the host."""
    while ops.is_transfer(node):
        if node.target is ops.to_host:
            return True
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return False


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
    live = Counter(resident)
    for place, gone, new in changes(storages):
        for storage in gone:
            live[storage.kind] -= storage.size
        for storage in new:
            live[storage.kind] += storage.size
        yield Point(place, live.total(), dict(live))


def resident_bytes(
    program: Program, plan: ShardingPlan, optimizer: OptimizerCost | None
) -> tuple[dict[str, int], int]:
    """Bytes a rank holds between steps: on the device by category, and on the host."""
    layouts = {id(layout): layout for layout in plan.layouts.values()}.values()
    shards = sum(layout.shard_bytes for layout in layouts)
    trained = sum(_own_bytes(layout) for layout in layouts if layout.requires_grad)
    states = 0 if optimizer is None else int(optimizer.states * trained)
    ends = [entry.node for entry in program.buffers] + [entry.node for entry in program.inputs]
    held = sum(map(node_bytes, ends))
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
