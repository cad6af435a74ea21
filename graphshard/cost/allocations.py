"""What a rank asks torch's allocator for, and gives back, in the order of a training step.

The runtime allocates every tensor on the compute stream, whichever stream fills it, so all requests
share one pool; programs replayed as CUDA graphs have one of their own. A storage of several tensors
(a unit's gathered parameters, say) is as many requests.

FSDP2 (`torch.distributed.fsdp.fully_shard`) allocates something else for a program, since it
copies: a unit is gathered into one flat buffer, from which its parameters are copied out, and its
gradients are copied into one flat buffer, which is reduced. Flat buffers of gathers and reduced
gradients are allocated on streams of their own, whose cached memory no other stream can use. A flat
buffer of forward stays until the next unit's copies are made, one of backward until its own are; a
buffer to reduce stays until the next reduce. The parameters of a unit are given back together, once
its backward is done, and gradients keep their dtype until then. Where nothing is compiled, a
selective checkpoint of the model keeps the result of each operator that its policy saves until the
backward of the checkpointed call is over, whether backward reads it or not
(`torch.utils.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import Tensor, fx

from graphshard.capture.annotation import KEEP, REGION
from graphshard.cost.memory import (
    ACCUMULATED,
    BUFFERS,
    INPUTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    OPTIMIZERS,
    SHARD_GRADIENTS,
    buffers_of,
    distinct,
    tensors_held,
    unpadded_bytes,
)
from graphshard.cost.op_cost import ATTENTION_BACKWARD
from graphshard.cost.runner import FSDP2, Runner
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import operands_of, wait_of
from graphshard.program.program import COMPUTE, FORWARD, Program
from graphshard.program.storages import (
    END,
    FULL_GRADIENTS,
    Storage,
    Storages,
    bytes_of,
    changes,
    gathered_bytes,
    node_bytes,
)

TEMPORARY = "inside operators"

_ACCUMULATING = frozenset({ops.accumulate_grad, ops.add_accumulated})


@dataclass(frozen=True)
class Request:
    """One tensor: its bytes, the stream or pool it belongs to, and what it is."""

    size: int
    stream: Hashable
    category: str
    name: str = ""
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.unit or '(root)'}" if self.name else self.category


@dataclass(frozen=True)
class Event:
    """A request (`new`), or the return of what `key` requested; `place` is that in the graph."""

    key: int
    place: int
    new: Request | None = None


@dataclass(frozen=True)
class StepRequests:
    """The requests of a training step.

    held: shards, buffers and inputs, which are there before the first step. events: of forward and
    backward. states: of the optimizer, requested in its first step. temporary: in every update.
    outliving: keys of the gradients, which are given back after the update. graphs: whether, from
    the third step on, forward and backward are CUDA graphs, with a pool of their own.
    """

    held: tuple[Request, ...]
    events: tuple[Event, ...]
    states: tuple[Request, ...]
    temporary: tuple[Request, ...]
    outliving: tuple[int, ...]
    graphs: bool = False


def requests_of(
    program: Program, plan: ShardingPlan, optimizer: str, storages: Iterable[Storage]
) -> StepRequests:
    """The requests of a step, of which forward and backward allocate `storages`, a tensor each.

    Those of `storages` that are born at one place are requested in their order.
    """
    storages = list(storages)
    events: list[Event] = []
    for place, freed, new in changes(storages):
        events += [Event(id(storage), place) for storage in freed]
        events += [
            Event(id(s), place, Request(s.size, s.stream, s.kind, s.name, s.unit)) for s in new
        ]
    outliving = [id(storage) for storage in storages if storage.size and storage.dies >= END]
    held = (
        Request(size, COMPUTE, category, name)
        for category, name, size in tensors_held(program, plan, program.stale)
        if size or category != INPUTS
    )
    states: list[Request] = []
    temporary: list[Request] = []
    cost = OPTIMIZERS[optimizer]
    if program.grad and not plan.policy.offloads("params"):
        trained = [layout for layout in distinct(plan) if layout.requires_grad]
        for layout in trained:
            size = unpadded_bytes(layout)
            states += _several(cost.states, size, OPTIMIZER, layout.fqn)
            temporary += _several(cost.temporary, size, OPTIMIZER_STEP, layout.fqn)
    return StepRequests(
        tuple(held),
        tuple(events),
        tuple(states),
        tuple(temporary),
        tuple(outliving),
        _replayed(program, plan),
    )


def lives_of(program: Program, storages: Iterable[Storage]) -> Iterator[Storage]:
    """What graphshard's runtime allocates for `storages` of `program`, one for each tensor."""
    storages = list(storages)
    becomes = {node: storage for storage in storages for node in storage.in_place}
    for storage in storages:
        yield from pieces_of(storage, becomes.get(storage.node, storage).dies)
    yield from temporaries(program)


def pieces_of(storage: Storage, dies: int) -> Iterator[Storage]:
    """One storage for each tensor that is allocated for `storage`, given back after `dies`."""
    whole = not storage.in_place and sum(storage.pieces) != storage.size
    for size in (storage.size,) if whole else storage.pieces:
        same = (size, dies) == (storage.size, storage.dies)
        yield storage if same else replace(storage, size=size, pieces=(), dies=dies)


def _replayed(program: Program, plan: ShardingPlan) -> bool:
    """Whether forward and backward are CUDA graphs, on the GPU that the program may run on."""
    if program.cuda_graphs is None:
        return False
    if program.device == "cuda":
        return program.cuda_graphs.why_not is None
    accumulates = any(node.target in _ACCUMULATING for node in program.nodes())
    return plan.policy.offload is None and program.sizes is None and not accumulates


def _several(times: float, size: int, category: str, name: str) -> list[Request]:
    request = Request(size, COMPUTE, category, name)
    return [request] * int(times) if size else []


def temporaries(program: Program) -> Iterator[Storage]:
    """What operators allocate and give back themselves, where it is large and known.

    FlashAttention's backward adds up the queries' gradients in float32, and keeps a number for each
    query ("FlashAttention-2", arXiv:2307.08691, algorithm 2).
    """
    for place, node in enumerate(program.graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        if packet in ATTENTION_BACKWARD and len(node.args) > 1:
            query = node.args[1]
            value = query.meta.get("val") if isinstance(query, fx.Node) else None
            if isinstance(value, Tensor) and value.dtype.itemsize == 2:
                elements = bytes_of(value) // value.dtype.itemsize
                heads = elements // max(1, int(value.shape[-1]))
                for size in (4 * elements, 4 * heads):
                    yield Storage(node, size, TEMPORARY, born=place, dies=place)


# -- of FSDP2 --------------------------------------------------------------------------------------


GATHERS = "FSDP2's gathers"
REDUCES = "FSDP2's reduces"


def fsdp2_lives(program: Program, runner: Runner = FSDP2) -> Iterator[Storage]:
    """What FSDP2 allocates in forward and backward of a step with the units of `program`.

    `runner` says what is not compiled, and whether outputs are held.
    """
    storages, held = runner.storages(program)
    place = storages.place
    if program.regions is None:
        _keep_for_checkpoints(program, storages)
    gathers = [node for node in program.nodes() if node.target is ops.all_gather]
    reduces = [node for node in program.nodes() if node.target in ops.REDUCES]
    waits = {gather: place[wait_of(gather)] for gather in gathers}
    sent, dropped = _gradients(reduces, storages.of_node, place)
    order: list[Storage] = []
    for storage in (*held, *storages.all):
        if storage.node.target is ops.all_gather or storage.node.target is ops.wait:
            continue  # below
        if id(storage) in dropped:
            continue
        order += pieces_of(storage, sent.get(id(storage), storage.dies))
    for storage in buffers_of(program, "nccl"):
        if storage.kind == ACCUMULATED:
            order += pieces_of(storage, storage.dies)
    border = place[program.first_backward()]
    forward = [gather for gather in gathers if gather.meta["phase"] == FORWARD]
    for gather in gathers:
        own = [s for s in storages.all if s.node is gather and s.size]
        if own:
            order += _gathered(gather, own, program, place, waits, forward, border)
    for reduce, after in zip_longest(reduces, reduces[1:]):  # none, if gradients are accumulated
        order += _reduced(reduce, after, place)
    order.sort(key=lambda storage: storage.born)  # stable: what operators allocate comes first
    yield from order
    yield from temporaries(program)


def _keep_for_checkpoints(program: Program, storages: Storages) -> None:
    """Let what selective checkpoints of the model save live until their backward is over."""
    ends: dict[object, int] = {}
    for node in program.nodes():
        if node.meta["phase"] != FORWARD and (calls := node.meta.get(REGION)):
            ends[calls] = storages.place[node]
    for node in program.nodes():
        if node.meta["phase"] == FORWARD and node.meta.get(KEEP):
            for storage in storages.of_node.get(node, ()):
                storage.dies = max(storage.dies, ends.get(node.meta.get(REGION), 0))


def _gradients(
    reduces: list[fx.Node],
    of_node: Mapping[fx.Node, tuple[Storage, ...]],
    place: Mapping[fx.Node, int],
) -> tuple[dict[int, int], set[int]]:
    """The place up to which each gradient lives, and the casts of gradients that are not made."""
    sent: dict[int, int] = {}
    dropped: set[int] = set()
    for reduce in reduces:
        for operand in operands_of(reduce):
            gradient: fx.Node = operand
            if operand.target is ops.cast:
                dropped.update(id(storage) for storage in of_node.get(operand, ()))
                gradient = operand.args[0]  # type: ignore[assignment]
            for storage in of_node.get(gradient, ()):
                if id(storage) not in dropped:
                    sent[id(storage)] = max(sent.get(id(storage), 0), place[reduce])
    return sent, dropped


def _gathered(
    gather: fx.Node,
    own: list[Storage],
    program: Program,
    place: Mapping[fx.Node, int],
    waits: dict[fx.Node, int],
    forward: list[fx.Node],
    border: int,
) -> Iterator[Storage]:
    copied = waits[gather]
    if gather in forward:
        later = [waits[other] for other in forward if waits[other] > copied]
        born, dies = copied, min(later, default=border)
    else:
        born, dies = place[gather], copied
    flat = Storage(gather, gathered_bytes(gather, program), BUFFERS, born=born, stream=GATHERS)
    if any(operand.target is ops.cast for operand in operands_of(gather)):
        shard = sum(map(node_bytes, operands_of(gather)))
        yield replace(flat, size=shard, dies=born, name=f"{gather.name}_cast")
    yield replace(flat, dies=dies, name=f"{gather.name}_flat")
    end = max(storage.dies for storage in own)
    for storage in own:
        for size in storage.pieces or (storage.size,):
            yield replace(storage, size=size, pieces=(), born=copied, dies=end)


def _reduced(
    reduce: fx.Node, after: fx.Node | None, place: Mapping[fx.Node, int]
) -> Iterator[Storage]:
    results = sum(map(bytes_of, wait_of(reduce).meta["val"]))
    full = sum(map(node_bytes, operands_of(reduce)))
    here = place[reduce]
    dies = place[wait_of(reduce)] if after is None else place[after] - 1
    yield Storage(reduce, full, FULL_GRADIENTS, born=here, dies=dies, name=f"{reduce.name}_flat")
    yield Storage(reduce, results, SHARD_GRADIENTS, born=here, stream=REDUCES)
