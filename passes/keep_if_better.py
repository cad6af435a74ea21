"""keep_if_better: another pass, undone where simulation says that the step gains nothing by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Score
from graphshard.schedule.score import budget_of, score_of


class _Step(Protocol):
    @property
    def name(self) -> str: ...

    def apply(self, program: Program, plan: ShardingPlan) -> None: ...


@dataclass(frozen=True)
class KeepIfBetter:
    """Apply `step` if, once all is scheduled, the program is faster by it, or as fast and smaller.

    What is compared are copies of the program without and with `step`, each after `then`. One that
    holds more than the budget is never kept. So a row of these passes makes nothing worse, each
    being tried on what the ones before it left.

    Args:
        step: a pass that takes a finished program and leaves one.
        then: the passes that follow in the end: `Overlap`.
    """

    step: _Step
    then: Sequence[_Step] = ()
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.step.name)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: the program has no budget; or from `step`.
        """
        budget = budget_of(program)
        if budget.best is None:
            budget = replace(budget, best=self._scheduled(program.copy(), plan))
            program.budget = budget
        assert budget.best is not None
        changed = program.copy()
        self.step.apply(changed, plan)
        score = self._scheduled(changed, plan)
        if budget.prefers(score, budget.best):
            self.step.apply(program, plan)
            program.budget = replace(budget, best=score)

    def _scheduled(self, program: Program, plan: ShardingPlan) -> Score:
        for step in self.then:
            step.apply(program, plan)
        return score_of(program, plan)
