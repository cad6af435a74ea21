"""The seconds and bytes of many orders of the same nodes, equal to those of `score_of`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.cost.clocks import Clocks
from graphshard.cost.memory import bytes_held
from graphshard.cost.streams import local_seconds, node_seconds, stream_of
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
    """Scores orders of the nodes of a program, which stays as it is.

    cost: by node, its seconds on its stream. steps: by node, what the walk does there, for those
    that take time or wait for something.
    """

    budget: Budget
    lifetimes: Lifetimes
    cost: Mapping[fx.Node, float]
    steps: Mapping[fx.Node, tuple[int, float, str, fx.Node | None]]

    @classmethod
    def of(cls, program: Program, plan: ShardingPlan, budget: Budget) -> OrderScorer:
        """A scorer for `program`, with the seconds and the bytes that count in `budget`."""
        hardware = budget.hardware
        cost = {node: node_seconds(node, program, hardware) for node in program.nodes()}
        steps: dict[fx.Node, tuple[int, float, str, fx.Node | None]] = {}
        for node, seconds in cost.items():
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
        """Seconds of forward and backward and the most bytes held, of all nodes in this order."""
        held = self.lifetimes.live(self.lifetimes.places(order))
        return Score(self.seconds(order), max(0, int(held.max())))

    def seconds(self, order: Sequence[fx.Node]) -> float:
        """Seconds of forward and backward (see `graphshard.cost.timeline`)."""
        clocks = Clocks(self.budget.hardware.contention)
        done: dict[fx.Node, float] = {}
        steps = self.steps
        for node in order:
            step = steps.get(node)
            if step is None:
                continue
            kind, seconds, stream, source = step
            if kind == _AWAIT:
                assert source is not None
                clocks.wait(done.get(source, 0.0))
                continue
            clocks.compute(seconds)
            if kind == _LAUNCH:
                done[node] = clocks.launch(stream, self.cost[node])
        return clocks.end


def budget_of(program: Program) -> Budget:
    """The budget that `program` is scheduled in.

    Raises:
        PassError: it has none yet.
    """
    if program.budget is None:
        raise PassError(
            "the program has no byte budget to be scheduled in; run SetBudget after InsertFree"
        )
    return program.budget


def score_of(program: Program, plan: ShardingPlan) -> Score:
    """The score of a finished `program`, counted as its budget counts.

    Raises:
        PassError: it has no budget.
    """
    budget = budget_of(program)
    seconds = timeline_of(program, plan, budget.hardware).seconds
    return Score(seconds, bytes_held(program, plan, budget.of_policy, budget.backend))
