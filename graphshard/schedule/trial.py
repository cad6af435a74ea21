"""Trying a rewrite on a copy of a program: what the step would cost once all is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Score
from graphshard.schedule.score import score_of


class Step(Protocol):
    """A pass, as `graphshard.pipeline.Pass`."""

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place."""
        ...


def scheduled(program: Program, plan: ShardingPlan, then: Sequence[Step]) -> Score:
    """The score of `program`, which is edited, after the passes `then`."""
    for step in then:
        step.apply(program, plan)
    return score_of(program, plan)
