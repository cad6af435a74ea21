"""What a rank asks torch's allocator for, and gives back, in the order of a training step.

The runtime allocates every tensor on the compute stream, whichever stream fills it, so all requests
share one pool; programs replayed as CUDA graphs have one of their own. A storage of several tensors
(a unit's gathered parameters, say) is as many requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, fx

from graphshard.cost.memory import (
    INPUTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    OPTIMIZERS,
    distinct,
    tensors_held,
    unpadded_bytes,
)
from graphshard.cost.op_cost import ATTENTION_BACKWARD
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.program import COMPUTE, Program
from graphshard.program.storages import END, Storage, bytes_of, changes

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
