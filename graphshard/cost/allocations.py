"""What a rank asks torch's allocator for, and gives back, in the order of a training step.

The runtime allocates every tensor on the compute stream, whichever stream fills it, so all requests
share one pool; programs replayed as CUDA graphs have one of their own. A storage of several tensors
(a unit's gathered parameters, say) is as many requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

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
from graphshard.program.program import Program
from graphshard.program.storages import END, Storage, bytes_of

COMPUTE = "compute"
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


@dataclass(frozen=True)
class Life:
    """A request, and the places of the first and of the last node that uses what it gave."""

    request: Request
    born: int
    dies: int


def requests_of(
    program: Program,
    plan: ShardingPlan,
    optimizer: str,
    lives: Iterable[Life],
) -> StepRequests:
    """The requests of a step, of which forward and backward allocate `lives`.

    Those of `lives` that are born at one place are requested in their order.
    """
    born: dict[int, list[int]] = {}
    dead: dict[int, list[int]] = {}
    outliving: list[int] = []
    all_lives = [life for life in lives if life.request.size]
    for key, life in enumerate(all_lives):
        born.setdefault(life.born, []).append(key)
        if life.dies < END:
            dead.setdefault(life.dies + 1, []).append(key)
        else:
            outliving.append(key)
    events: list[Event] = []
    for place in sorted({*born, *dead}):
        events += [Event(key, place) for key in dead.get(place, ())]
        events += [Event(key, place, all_lives[key].request) for key in born.get(place, ())]
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


def lives_of(program: Program, storages: Iterable[Storage]) -> Iterator[Life]:
    """What graphshard's runtime allocates for `storages`, which are those of `program`."""
    storages = list(storages)
    becomes = {node: storage for storage in storages for node in storage.in_place}
    for storage in storages:
        result = becomes.get(storage.node)
        yield from lives(storage, COMPUTE, result.dies if result else None)
    yield from temporaries(program)


def lives(storage: Storage, stream: Hashable, dies: int | None = None) -> Iterator[Life]:
    """The requests of `storage`, on `stream`; given back after `dies`, if given."""
    for size in _pieces(storage):
        request = Request(size, stream, storage.kind, storage.node.name, storage.unit)
        yield Life(request, storage.born, storage.dies if dies is None else dies)


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


def _pieces(storage: Storage) -> tuple[int, ...]:
    """The bytes of each tensor of `storage` that is allocated for it."""
    pieces = tuple(size for size in storage.pieces if size)
    if storage.in_place:
        return pieces
    return pieces if sum(pieces) == storage.size else (storage.size,)


def temporaries(program: Program) -> Iterator[Life]:
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
                unit = str(node.meta.get("unit", ""))
                for size in (4 * elements, 4 * heads):
                    request = Request(size, COMPUTE, TEMPORARY, node.name, unit)
                    yield Life(request, place, place)
