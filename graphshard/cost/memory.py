"""Bytes alive on a rank at each point of a training step, and the storages that hold them.

The state between steps (shards, optimizer states, buffers and inputs) is alive throughout. The step
adds the storages of its program (see `graphshard.program.storages`), the reduced gradients, and the
temporaries of the optimizer's update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.cost.runner import Runner
from graphshard.errors import CostError
from graphshard.planning.layout import ParamLayout
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops, packing
from graphshard.program.aliases import storage_root, unpacks, uses_of
from graphshard.program.annotations import Budget
from graphshard.program.collective import Collective, operands_of, wait_of
from graphshard.program.packing import reduced_in_place
from graphshard.program.program import Program
from graphshard.program.sizes import is_contiguous
from graphshard.program.storages import (
    END,
    KINDS,
    Storage,
    bytes_of,
    changes,
    live_bytes,
    node_bytes,
    storages_of,
)


def counted_storages(program: Program, budget: Budget) -> list[Storage]:
    """The storages of a finished `program` that count in `budget`."""
    buffers = () if budget.of_policy else buffers_of(program, budget.backend)
    return [*storages_of(program).all, *buffers]


def held_by_place(program: Program, budget: Budget) -> list[int]:
    """By place in the graph, the bytes of a finished `program` that count in `budget`."""
    return live_bytes(counted_storages(program, budget), len(program.graph.nodes))


BUFFERS = "communication buffers"


SHARD_GRADIENTS = "gradients"


ACCUMULATED = "gradients accumulated by no_sync"


def buffers_of(program: Program, backend: str) -> Iterator[Storage]:
    """Storages of collectives and of reduced or accumulated gradients, in the order allocated.

    `backend` is "nccl" or "gloo".
    """
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    for storage in _buffers(program, backend):
        yield storage.settle(place)


def _buffers(program: Program, backend: str) -> Iterator[Storage]:
    returned = {grad for grad in program.results().grads if grad is not None}
    start = next(iter(program.graph.nodes))
    for node in program.nodes():
        if node.target in ops.REDUCES:
            yield from _reduce_storages(node, program, backend, returned)
        elif node.target is ops.all_gather:
            yield from _gather_storages(node, program, backend)
        elif node.target is ops.accumulate_grad:
            yield Storage(node, node_bytes(node), ACCUMULATED)
        elif ops.is_transfer(node):
            size = node_bytes(node)
            if node.target is ops.add_accumulated:
                # Added in place to the accumulated gradient, which then counts as the sum.
                yield Storage(node, size, ACCUMULATED, first=start, ends=[node], over=-1)
            if ops.origin(node) is node or not ops.is_reduced(node):
                continue
            if node.target is ops.arrive or _on_host(node):
                continue
            stays = node in returned
            ends = [] if stays else uses_of(node)
            yield Storage(node, size, SHARD_GRADIENTS if stays else BUFFERS, ends=ends)


def _gather_storages(node: fx.Node, program: Program, backend: str) -> Iterator[Storage]:
    """The message that small shards are packed into, and the buffer that receives it."""
    ranks = ranks_of(node, program)
    shards = [operand.meta["val"] for operand in operands_of(node)]
    messages = [sum(sizes) for sizes in _messages(shards, packing.GATHER_BELOW[backend])]
    if messages and ranks > 1:
        pieces = tuple(size for message in messages for size in (message, message * ranks))
        yield Storage(node, sum(pieces), BUFFERS, ends=[wait_of(node)], pieces=pieces)


def _reduce_storages(
    node: fx.Node, program: Program, backend: str, returned: set[fx.Node]
) -> Iterator[Storage]:
    """The buffers of a reduce and the gradients it returns; `returned`: gradients of the step."""
    wait = wait_of(node)
    results = wait.meta["val"]
    ranks = ranks_of(node, program)
    op = ops.OPS[node.target]
    scattered = op.moves == "reduce_scatter" and ranks > 1
    exchanged = scattered and backend == "gloo" and ranks > 2
    result_bytes = sum(map(bytes_of, results))
    own = reduced_in_place(node, backend) if ranks > 1 else frozenset(range(len(results)))
    taken = _taken(node, own) if ranks > 1 else {}
    below = packing.REDUCE_BELOW[backend] if scattered else None
    first, late = node, 0
    if scattered:
        copies, padding = _send_bytes(node, results, ranks, backend)
        if copies:  # the copied operands are freed once the reduce is launched
            yield Storage(node, sum(copies), BUFFERS, ends=[node], pieces=tuple(copies))
        if padding:
            yield Storage(node, padding, BUFFERS, late=1, ends=[wait])
        if exchanged:
            yield Storage(node, result_bytes * ranks, BUFFERS, ends=[wait])
            first = wait
        elif backend == "gloo":
            halves = [bytes_of(r) for r in results if r.dtype is torch.float16]
            if halves:  # summed in float32
                yield Storage(wait, 2 * max(halves), BUFFERS, ends=[wait])
    elif op.scatters and ranks > 1:
        # A copy of the full gradients is reduced in place; each rank copies its shards out of it.
        yield Storage(node, result_bytes * ranks, BUFFERS, ends=[node])
        first = wait
    else:
        # The copy that is reduced in place and returned outlives the gradient it was copied from.
        copied = sum(
            bytes_of(r) for index, r in enumerate(results) if index not in own or ranks == 1
        )
        if copied:
            yield Storage(node, copied, BUFFERS, ends=[node])
        first, late = wait, 1
    unpacked = unpacks(wait)
    stays = any(user in returned for user in unpacked)
    yield Storage(
        node,
        result_bytes,
        SHARD_GRADIENTS if stays else BUFFERS,
        first=first,
        late=late,
        ends=[] if stays else uses_of(*unpacked) or [wait],
        pieces=tuple(_result_pieces(results, own, taken, below)),
        in_place=tuple(taken.values()),
    )


def _taken(reduce: fx.Node, own: Collection[int]) -> dict[int, fx.Node]:
    """By the place of an operand that is reduced where it lies, the node that allocates it.

    An earlier reduce allocates all its results at once, so these are taken together or not at all.
    """
    roots = {index: storage_root(operands_of(reduce)[index]) for index in sorted(own)}
    taken = {}
    for index, root in roots.items():
        if not ops.is_unpack(root):
            taken[index] = root
        elif set(unpacks(earlier := ops.collective_of(root))) <= set(roots.values()):
            taken[index] = earlier
    return taken


def _send_bytes(
    node: fx.Node, shards: list[torch.Tensor], ranks: int, backend: str
) -> tuple[list[int], int]:
    """Bytes of each copy of a reduce_scatter's operands, and bytes of padding in them.

    Gradients are padded, ordered by rank, and packed into one message if small. `shards` are the
    results, padding included.
    """
    sizes = [bytes_of(shard) * ranks for shard in shards]
    operands = [operand.meta["val"] for operand in operands_of(node)]
    dims = Collective.of(node).dims
    copied, padding = [], 0
    for operand, dim, size in zip(operands, dims, sizes, strict=True):
        laid_out = is_contiguous(operand) and not operand.is_conj()
        if dim or size != bytes_of(operand) or not laid_out:
            copied.append(size)
            padding += size - bytes_of(operand)
    packed = [ranks * sum(sizes) for sizes in _messages(shards, packing.REDUCE_BELOW[backend])]
    divided = [
        size
        for operand, size in zip(operands, sizes, strict=True)
        if operand.dtype is torch.float16 and backend != "gloo"
    ]
    return copied + packed + divided, padding


def _messages(tensors: list[torch.Tensor], below: int) -> list[list[int]]:
    """For each message that several of `tensors` are packed into, the bytes of these."""
    sizes = [bytes_of(tensor) for tensor in tensors]
    messages = packing.packed(sizes, [tensor.dtype for tensor in tensors], below)
    return [[sizes[i] for i in indices] for indices in messages]


def _result_pieces(
    results: list[torch.Tensor],
    own: Collection[int],
    taken: Collection[int],
    below: int | None,
) -> list[int]:
    """The bytes of each new tensor that a reduce returns its results in; `taken` ones are not new.

    Those of a packed message stay parts of it. `below` is the limit of packing; None for an
    all_reduce, which packs all that are not its `own`.
    """
    sizes, dtypes = [bytes_of(result) for result in results], [r.dtype for r in results]
    if below is not None:
        messages = packing.packed(sizes, dtypes, below)
    else:
        copied = [index for index in range(len(results)) if index not in own]
        messages = [[i for i in copied if dtypes[i] is dtype] for dtype in dict.fromkeys(dtypes)]
    packed = {index for message in messages for index in message}
    alone = [size for i, size in enumerate(sizes) if i not in packed and i not in taken]
    return alone + [sum(sizes[index] for index in message) for message in messages if message]


def _on_host(node: fx.Node) -> bool:
    """Whether `node`, or the value it was transferred from, was copied to the host."""
    while ops.is_transfer(node):
        if node.target is ops.to_host:
            return True
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return False


SHARDS = "shards"


ROW_COPIES = "copies of rows"  # to see writes into resident parameters


OPTIMIZER = "optimizer"


OPTIMIZER_STEP = "optimizer's step"


INPUTS = "inputs and buffers"


CATEGORIES = (
    SHARDS,
    ROW_COPIES,
    *KINDS,
    BUFFERS,
    SHARD_GRADIENTS,
    ACCUMULATED,
    OPTIMIZER,
    OPTIMIZER_STEP,
    INPUTS,
)


@dataclass(frozen=True)
class OptimizerCost:
    """Memory of an optimizer, in multiples of the bytes of the trained shards.

    states: kept between steps. temporary: alive during the update. moved: read and written by it.
    """

    states: float
    temporary: float
    moved: float


OPTIMIZERS: Mapping[str, OptimizerCost] = {
    "none": OptimizerCost(0, 0, 0),
    "sgd": OptimizerCost(0, 0, 3),
    # Each operator of a foreach implementation (torch's default on accelerators) passes over memory
    # once: here mul_, add_ (of the buffer), add_ (of the parameter).
    "sgd-momentum": OptimizerCost(1, 0, 8),
    # mul_, lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_; the root is a list of temporaries.
    "adamw": OptimizerCost(2, 1, 20),
    "adamw-fused": OptimizerCost(2, 0, 7),
}


@dataclass(frozen=True)
class Point:
    """The bytes alive when the node at `place` has run, in total and by category."""

    place: int
    bytes: int
    by_category: Mapping[str, int]


@dataclass
class MemoryCurve:
    """Bytes alive on the device over a step.

    valley: bytes alive between steps. peak: the point with the most bytes. holders: the storages
    alive at the peak, largest first. points: one for each place where a storage is allocated or
    freed. host: bytes kept on the host between steps. by_unit: bytes at the peak, by unit and
    category. storages: all storages that the step allocates.
    """

    valley: int
    valley_by_category: Mapping[str, int]
    peak: Point
    holders: tuple[Storage, ...]
    points: tuple[Point, ...]
    host: int = 0
    by_unit: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    storages: tuple[Storage, ...] = ()


def memory_of(
    program: Program,
    plan: ShardingPlan,
    *,
    optimizer: str = "adamw",
    backend: str = "nccl",
    runner: Runner | None = None,
) -> MemoryCurve:
    """Bytes over a training step, if gradients are set to None after each step.

    Without a `runner` operators count one by one, which is what a region that cannot be compiled
    takes.
    """
    if optimizer not in OPTIMIZERS:
        raise CostError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {optimizer!r}")
    computed, held = (storages_of(program), []) if runner is None else runner.storages(program)
    storages = [*held, *computed.all, *buffers_of(program, backend)]
    optimizer_cost = OPTIMIZERS[optimizer] if program.grad else None
    resident, host = resident_bytes(program, plan, optimizer_cost, program.stale)
    between = Counter(resident)
    for storage in held:
        between[storage.kind] += storage.size
    at_rest = Point(0, sum(between.values()), dict(between))
    points = [at_rest, *_points(storages, resident)]
    after = Counter(resident)
    for storage in storages:
        if storage.dies >= END:
            after[storage.kind] += storage.size
    temporary = int(OPTIMIZERS[optimizer].temporary * after[SHARD_GRADIENTS])
    if program.grad and temporary:
        after[OPTIMIZER_STEP] += temporary
        points.append(Point(len(program.graph.nodes), sum(after.values()), dict(after)))
    peak = max(points, key=lambda point: point.bytes)
    alive = [s for s in storages if s.size and s.born <= peak.place <= s.dies]
    alive.sort(key=lambda storage: -storage.size)
    by_unit: dict[str, Counter[str]] = {}
    for storage in alive:
        by_unit.setdefault(storage.unit, Counter())[storage.kind] += storage.size
    return MemoryCurve(
        at_rest.bytes,
        at_rest.by_category,
        peak,
        tuple(alive),
        tuple(points),
        host,
        by_unit,
        tuple(storages),
    )


def _points(storages: Iterable[Storage], resident: Mapping[str, int]) -> Iterator[Point]:
    """One point for each place where a storage is allocated or freed."""
    live = Counter(resident)
    for place, freed, new in changes(storages):
        for storage in freed:
            live[storage.kind] -= storage.size
        for storage in new:
            live[storage.kind] += storage.size
        yield Point(place, live.total(), dict(live))


def resident_bytes(
    program: Program,
    plan: ShardingPlan,
    optimizer: OptimizerCost | None,
    stale: Collection[str],
) -> tuple[dict[str, int], int]:
    """Bytes a rank holds between steps, on the device by category, and on the host.

    `optimizer` is None without training. See `tensors_held` for `stale`.
    """
    layouts = distinct(plan)
    trained = sum(unpadded_bytes(layout) for layout in layouts if layout.requires_grad)
    states = 0 if optimizer is None else int(optimizer.states * trained)
    offloads = plan.policy.offloads("params")
    on_device = {} if offloads else {SHARDS: 0, ROW_COPIES: 0, OPTIMIZER: states}
    on_device[INPUTS] = 0
    for category, _, size in tensors_held(program, plan, stale):
        on_device[category] += size
    return on_device, sum(layout.shard_bytes for layout in layouts) + states if offloads else 0


def tensors_held(
    program: Program, plan: ShardingPlan, stale: Collection[str]
) -> Iterator[tuple[str, str, int]]:
    """Category, name and bytes of each tensor that a rank holds from the start on, on its device.

    `stale` are the FQNs of the resident parameters that are gathered. Of the others a rank keeps a
    copy of its rows, to see whether they have changed.
    """
    if not plan.policy.offloads("params"):
        for layout in distinct(plan):
            yield SHARDS, layout.fqn, layout.shard_bytes
            if layout.resident and layout.world_size > 1 and layout.fqn not in stale:
                rows = prod(layout.shard_shape) * layout.dtype.itemsize
                yield ROW_COPIES, layout.fqn, rows
    for node in [entry.node for entry in program.buffers] + [
        entry.node for entry in program.inputs
    ]:
        yield INPUTS, node.name, node_bytes(node)


def distinct(plan: ShardingPlan) -> list[ParamLayout]:
    """The layouts of `plan`, each once however many names its parameter has."""
    return list({id(layout): layout for layout in plan.layouts.values()}.values())


def unpadded_bytes(layout: ParamLayout) -> int:
    """Bytes of the first rank's shard without padding, for which an optimizer keeps states."""
    return prod(layout.part_shape(0)) * layout.dtype.itemsize
