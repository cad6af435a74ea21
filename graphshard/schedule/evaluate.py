"""Score orders of the nodes of a program by seconds and bytes, without changing the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphshard.cost.memory import BUFFERS, counted_storages
from graphshard.cost.streams import Clocks, NodeCost, local_seconds, node_cost, stream_of
from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.annotations import Budget, Score
from graphshard.program.program import Program
from graphshard.program.storages import FULL_GRADIENTS, PARAMETERS
from graphshard.schedule.jobs import JobTable
from graphshard.schedule.list_scheduler import ByteTable

_COMPUTE, _LAUNCH, _AWAIT = range(3)


@dataclass(frozen=True)
class OrderScorer:
    """Scores orders of the nodes of a program without changing it.

    budget: the program's budget. lifetimes: its storages. cost: by node, its cost on its stream.
    steps: by node that takes time or waits, the kind of step, seconds of compute, the stream it
    launches on, and the node it waits for.
    """

    budget: Budget
    lifetimes: Lifetimes
    cost: Mapping[fx.Node, NodeCost]
    steps: Mapping[fx.Node, tuple[int, float, str, fx.Node | None]]

    @classmethod
    def of(cls, program: Program, plan: ShardingPlan, budget: Budget) -> OrderScorer:
        """The scorer of a finished `program`; seconds and bytes count as in `budget`."""
        hardware = budget.hardware.for_ranks(plan.world_size)
        cost = {node: node_cost(node, program, hardware) for node in program.nodes()}
        steps: dict[fx.Node, tuple[int, float, str, fx.Node | None]] = {}
        for node, (seconds, _, _) in cost.items():
            if ops.is_collective(node) or node.target in ops.COPIES:
                local = local_seconds(node, program, hardware)
                steps[node] = _LAUNCH, local, stream_of(node), None
            elif node.target in (ops.wait, ops.arrive):
                steps[node] = _AWAIT, 0.0, "", node.all_input_nodes[0]
            elif seconds:
                steps[node] = _COMPUTE, seconds, "", None
        return cls(budget, Lifetimes.of(program, budget), cost, steps)

    def score(self, order: Sequence[fx.Node]) -> Score:
        """Seconds of forward and backward in `order`, and the maximum bytes held."""
        live = self.lifetimes.live(self.lifetimes.places(order))
        return Score(self.seconds(order), max(0, int(live.max())))

    def seconds(self, order: Sequence[fx.Node], transfers: float = 1.0) -> float:
        """Seconds of forward and backward in `order` (see `graphshard.cost.timeline`).

        transfers: how many times as long as estimated each collective and copy takes.
        """
        clocks = Clocks(self.budget.hardware)
        ends: dict[fx.Node, float] = {}
        steps = self.steps
        for node in order:
            step = steps.get(node)
            if step is None:
                continue
            kind, seconds, stream, source = step
            if kind == _AWAIT:
                assert source is not None
                clocks.wait(ends.get(source, 0.0))
                continue
            if kind == _LAUNCH:
                clocks.compute(seconds, only_moves=True)
                took, load, _ = self.cost[node]
                copy = node.target in ops.COPIES
                ends[node] = clocks.launch(stream, transfers * took, load=load, copy=copy)
            else:
                clocks.compute(seconds, only_moves=self.cost[node].moves)
        return clocks.end


def budget_of(program: Program) -> Budget:
    """The byte budget of `program`."""
    if program.budget is None:
        raise PassError(
            "the program has no byte budget to be scheduled in; run SetBudget after InsertFree"
        )
    return program.budget


_SHARDING = frozenset({PARAMETERS, FULL_GRADIENTS, BUFFERS})


@dataclass(frozen=True)
class Lifetimes:
    """The storages of a program that count in a budget, by the nodes that bound their lifetimes.

    Storages that outlive the step come last and have no ends. Tensors are int64 with one entry per
    storage, except where noted.

    number: by node, its number in the tensors. size: bytes. first: the number of the node at which
    the storage is born. late: places after `first`. ends: numbers
    of the nodes that use storages, one storage after the other. owner: by entry of `ends`, the
    index of its storage. over: places after the last of its ends at which a storage dies, only for
    storages with ends. sharding: bool, whether it is an unsharded parameter, a gradient to reduce,
    or a buffer of a collective.
    """

    number: Mapping[fx.Node, int]
    size: Tensor
    first: Tensor
    late: Tensor
    ends: Tensor
    owner: Tensor
    over: Tensor
    sharding: Tensor

    @classmethod
    def of(cls, program: Program, budget: Budget) -> Lifetimes:
        """The lifetimes of the storages of `program` that count in `budget`."""
        number = {node: index for index, node in enumerate(program.graph.nodes)}
        storages = [storage for storage in counted_storages(program, budget) if storage.size]
        storages.sort(key=lambda storage: not storage.ends)
        ends: list[int] = []
        owner: list[int] = []
        for place, storage in enumerate(storages):
            ends += [number[end] for end in storage.ends]
            owner += [place] * len(storage.ends)
        return cls(
            number,
            _array(storage.size for storage in storages),
            _array(number[storage.first or storage.node] for storage in storages),
            _array(storage.late for storage in storages),
            _array(ends),
            _array(owner),
            _array(storage.over for storage in storages if storage.ends),
            torch.tensor([storage.kind in _SHARDING for storage in storages], dtype=torch.bool),
        )

    def places(self, order: Iterable[fx.Node]) -> Tensor:
        """By node number, the place of each node in `order`, which has all nodes; int64."""
        numbers = torch.tensor([self.number[node] for node in order])
        places = torch.empty(len(self.number), dtype=torch.int64)
        places[numbers] = torch.arange(len(self.number))
        return places

    def spans(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """By storage, the place of its birth, and of its death if it has ends; int64.

        `places` is from `places`.
        """
        born = places[self.first] + self.late
        last = torch.zeros(len(self.over), dtype=torch.int64)
        last.scatter_reduce_(0, self.owner, places[self.ends], "amax", include_self=False)
        return born, last + self.over

    def live(self, places: Tensor, *, sharding: bool = False) -> Tensor:
        """By place, the bytes alive while the node there runs, as int64 of shape `(nodes,)`.

        With `sharding`, only storages that exist because of sharding count.
        """
        born, dies = self.spans(places)
        size = self.size * self.sharding if sharding else self.size
        change = torch.zeros(len(places) + 2, dtype=torch.int64)
        change.index_add_(0, born, size)
        change.index_add_(0, dies + 1, -size[: len(dies)])
        return change.cumsum(0)[: len(places)]

    def sharding_bytes(self, order: Iterable[fx.Node]) -> int:
        """The maximum bytes held at once because of sharding, in `order`."""
        return int(self.live(self.places(order), sharding=True).max())


def _array(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)


def least_bytes(
    order: Sequence[fx.Node], lifetimes: Lifetimes, table: JobTable, budget: Budget
) -> ByteTable:
    """The bytes at each place of the frame in an `order` where each job holds the fewest bytes.

    It also sets `Job.extra_bytes` of each job in `table`. The rule "minimal" placed `order`.
    """
    places = lifetimes.places(order)
    count = len(places)
    least = bytes_by_frame(lifetimes.live(places), places, lifetimes, table)
    born, dies = lifetimes.spans(places)
    starting, ending = torch.zeros((2, count + 2), dtype=torch.int64)
    starting.index_add_(0, born, lifetimes.size)
    ending.index_add_(0, dies, lifetimes.size[: len(dies)])
    for job in table.jobs:
        if job.is_gather:
            launch = _numbers((*job.from_host, *job.issue), lifetimes)
            job.extra_bytes = int(starting[places[launch]].sum())
        else:
            job.extra_bytes = int(ending[places[_numbers(job.wait[:1], lifetimes)]].sum())
    return ByteTable(least, torch.full_like(least, budget.bytes))


def bytes_by_frame(live: Tensor, places: Tensor, lifetimes: Lifetimes, table: JobTable) -> Tensor:
    """The maximum of `live`, bytes at each place of an order, by place of the frame.

    Bytes alive between two nodes of the frame count at the second. Both are int64 tensors.
    """
    frame = places[_numbers(table.frame, lifetimes)]
    owner = torch.zeros(len(places), dtype=torch.int64)
    owner[frame] = 1
    # A node's place in the frame is the number of frame nodes before it.
    owner = (owner.cumsum(0) - owner).clamp(max=max(0, len(frame) - 1))
    by_frame = torch.zeros(max(1, len(frame)), dtype=torch.int64)
    return by_frame.scatter_reduce_(0, owner, live, "amax")


def _numbers(nodes: Iterable[fx.Node], lifetimes: Lifetimes) -> Tensor:
    return torch.tensor([lifetimes.number[node] for node in nodes], dtype=torch.int64)
