"""Trying a rewrite on a copy of a program: what the step would cost once all is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
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
    """A program that `step` made of a copy of another; its score in the best order, that, and what
    it holds for sharding's sake.
    """

    program: Program
    order: list[fx.Node]
    score: Score
    sharding: int


def scheduled(
    program: Program, plan: ShardingPlan, then: Sequence[Step] = (), *, lean: bool = False
) -> Trial:
    """What `program` would cost once the passes `then` ran and it is scheduled; it stays as it is.

    `lean` is that of `best_order`.

    Raises:
        PassError: it has no budget; or from one of `then`.
    """
    if then:
        program = program.copy()
    for step in then:
        step.apply(program, plan)
    best = best_order(program, plan, budget_of(program), lean=lean)
    return Trial(program, best.order, best.score, best.sharding)


def tried(
    step: Step, program: Program, plan: ShardingPlan, then: Sequence[Step] = ()
) -> Trial | None:
    """What `program` would cost with `step` and then `then`; None if `step` changes nothing.

    Raises:
        PassError: from a pass; or the program has no budget.
    """
    changed = program.copy()
    step.apply(changed, plan)
    if _form(changed) == _form(program):
        return None
    for later in then:
        later.apply(changed, plan)
    return scheduled(changed, plan)


def _form(program: Program) -> list[tuple[str, str, tuple[str, ...]]]:
    """What tells the nodes of a program from another's that was made from it."""
    return [
        (node.name, str(node.kwargs) if node.kwargs else "", tuple(map(str, node.all_input_nodes)))
        for node in program.graph.nodes
    ]
