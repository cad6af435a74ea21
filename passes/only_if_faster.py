"""only_if_faster: another pass, undone where simulation says that the step gains nothing by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import Step, scheduled, tried


@dataclass(frozen=True)
class OnlyIfFaster:
    """Apply `step` if, once all is scheduled, the program is faster by it, or as fast and smaller.

    What is compared are the program and a copy of it with `step`, each in its best order. One that
    holds more than the budget is never kept. So a row of these passes makes nothing worse, each
    being tried on what the ones before it left.

    Args:
        step: a pass that takes a finished program and leaves one.
        then: the passes between all of these and `Overlap`.
    """

    step: Step
    then: Sequence[Step] = ()
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.step.name)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: the program has no budget; or from `step`.
        """
        budget = budget_of(program)
        trial = tried(self.step, program, plan, self.then)
        if trial is None:
            return
        best = budget.best or scheduled(program, plan, self.then).score
        if budget.prefers(trial.score, best):
            self.step.apply(program, plan)
            best = trial.score
        program.budget = replace(budget, best=best)
