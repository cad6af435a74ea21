"""Score many orders of the same nodes by seconds and bytes, as `score_of` scores a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.cost.memory import bytes_held
from graphshard.cost.streams import Clocks, NodeCost, local_seconds, node_cost, stream_of
from graphshard.cost.timeline import timeline_of
from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.annotations import Budget, Score
from graphshard.program.program import Program
from graphshard.schedule.memory import Lifetimes

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
            if ops.is_collective(node):
                local = local_seconds(node, program, hardware)
                steps[node] = _LAUNCH, local, stream_of(node), None
            elif node.target in ops.COPIES:
                steps[node] = _LAUNCH, 0.0, stream_of(node), None
            elif node.target is ops.wait:
                steps[node] = _AWAIT, 0.0, "", ops.collective_of(node)
            elif node.target is ops.arrive:
                steps[node] = _AWAIT, 0.0, "", node.all_input_nodes[0]
            elif seconds:
                steps[node] = _COMPUTE, seconds, "", None
        return cls(budget, Lifetimes.of(program, budget), cost, steps)

    def score(self, order: Sequence[fx.Node]) -> Score:
        """Seconds of forward and backward in `order`, and the maximum bytes held."""
        live = self.lifetimes.live(self.lifetimes.places(order))
        return Score(self.seconds(order), max(0, int(live.max())))

    def seconds(self, order: Sequence[fx.Node]) -> float:
        """Seconds of forward and backward in `order` (see `graphshard.cost.timeline`)."""
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
                ends[node] = clocks.launch(stream, took, load=load, copy=copy)
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


def score_of(program: Program, plan: ShardingPlan) -> Score:
    """The score of a finished `program`, counted as in its budget."""
    budget = budget_of(program)
    seconds = timeline_of(program, plan, budget.hardware).seconds
    return Score(seconds, bytes_held(program, plan, budget.of_policy, budget.backend))
