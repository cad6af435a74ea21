"""by_cost: base classes of passes that decide by simulating the step."""

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
    """A pass between `SetBudget` and `Overlap` that decides by simulating the finished program."""

    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The later passes before `Overlap` that establish a stage, as a finished program needs."""
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
    """A pass that can be applied only if it makes the scheduled step faster.

    The program and a rewritten copy are compared, each in its best order. The copy wins if its step
    is faster, or as fast with fewer bytes, and if it keeps the byte budget. So a sequence of
    candidates never makes a step worse.

    Args:
        only_if_faster: compare first; False applies the pass in any case.
    """

    only_if_faster: bool = field(default=False, kw_only=True)

    @abstractmethod
    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, without a comparison."""

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
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
