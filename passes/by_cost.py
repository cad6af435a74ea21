"""by_cost: the passes that simulation decides about, and how one is kept only if it pays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import PassLike, RehearsingPass, Stage, stages_of
from graphshard.program.program import Program
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import trial_after, trial_of


class ByCost(RehearsingPass):
    """A pass between `SetBudget` and `Overlap` that simulates the finished program."""

    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The passes before `Overlap` that establish a stage: no program is finished without."""
        rest: list[PassLike] = []
        for step in following:
            stages = stages_of(step)
            if Stage.SCHEDULED in stages:
                break
            if stages:
                rest.append(step)
        return tuple(rest)


@dataclass(frozen=True)
class Candidate(ByCost):
    """A pass that may be applied `only_if_faster`: if the program, once all is scheduled, is faster
    by it, or as fast and smaller.

    The program and a rewritten copy of it are compared, each in its best order. A copy that holds
    more than the budget never wins. So a row of candidates makes nothing worse, each being tried on
    what the ones before it left.

    Args:
        only_if_faster: whether to compare, or to apply the pass in any case.
    """

    only_if_faster: bool = field(default=False, kw_only=True)

    @abstractmethod
    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, in any case."""

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        """See `RehearsingPass.apply_before`.

        Raises:
            PassError: the program has no budget; or from `apply`.
        """
        if not self.only_if_faster:
            self.apply(program, plan)
            return
        budget = budget_of(program)
        trial = trial_after(self, program, plan, rest)
        if trial is None:
            return
        best = budget.best or trial_of(program, plan, rest).score
        if budget.prefers(trial.score, best):
            self.apply(program, plan)
            best = trial.score
        program.budget = replace(budget, best=best)
