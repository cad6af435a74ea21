"""How good a finished program is, by simulation."""

from __future__ import annotations

from graphshard.cost.memory import memory_of
from graphshard.cost.timeline import timeline_of
from graphshard.errors import PassError
from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Budget, Score
from graphshard.step_memory import storages_of


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
