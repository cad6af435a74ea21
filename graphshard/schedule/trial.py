"""Trying a rewrite on a copy of a program: what the step would cost once all is scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.best import best_order
from graphshard.schedule.budget import Score
from graphshard.schedule.score import budget_of


class Step(Protocol):
    """A pass, as `graphshard.pipeline.Pass`."""

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place."""
        ...


@dataclass(frozen=True)
class Trial:
    """A program that `step` made of a copy of another; its score in the best order, and that."""

    program: Program
    order: list[fx.Node]
    score: Score


def scheduled(program: Program, plan: ShardingPlan) -> Trial:
    """What `program` as it is would cost once it is scheduled.

    Raises:
        PassError: it has no budget.
    """
    best = best_order(program, plan, budget_of(program))
    return Trial(program, best.order, best.score)


def tried(step: Step, program: Program, plan: ShardingPlan) -> Trial | None:
    """What `program` would cost with `step`; None if that changes nothing about it.

    Raises:
        PassError: from `step`; or the program has no budget.
    """
    changed = program.copy()
    step.apply(changed, plan)
    if _form(changed) == _form(program):
        return None
    return scheduled(changed, plan)


def _form(program: Program) -> list[tuple[str, str, tuple[str, ...]]]:
    """What tells the nodes of a program from another's that was made from it."""
    return [
        (node.name, str(node.kwargs) if node.kwargs else "", tuple(map(str, node.all_input_nodes)))
        for node in program.graph.nodes
    ]
