"""Simulating candidates: from a captured program, through the passes, to time and memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from graphshard.cost.estimate import Estimate, estimate_of
from graphshard.errors import CaptureError, PassError, PlanError, PolicyError
from graphshard.passes.prefetch import Prefetch
from graphshard.passes.recompute_budget import RecomputeToBudget
from graphshard.pipeline import default_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan
from graphshard.policy.base import Policy
from graphshard.program.pass_protocol import PassLike, RehearsingPass, apply_pass, apply_passes
from graphshard.program.program import Program
from graphshard.program.spans import assign_units
from graphshard.tune.captures import Captures
from graphshard.tune.space import RUNGS, Candidate, Group, Ladder, Space, rounded
from graphshard.tune.tuning import Outcome


@dataclass
class _Started:
    """A program after the passes that do not depend on where gathers are issued."""

    key: Any
    program: Program


class Simulator:
    """Candidates for one model, each simulated once.

    Not verified: that is left to whoever keeps one.
    """

    def __init__(
        self, model: nn.Module, captures: Captures, space: Space, blocks: Sequence[str]
    ) -> None:
        self.model, self.captures, self.space, self.blocks = model, captures, space, blocks
        self.simulated = 0
        self.known: dict[Candidate, Outcome | None] = {}
        self._by_program: dict[Any, Outcome] = {}
        self.estimates: dict[Candidate, Estimate] | None = None  # filled if it is a dictionary
        self._several = False
        self._started: _Started | None = None
        self._memo: tuple[Any, list[Any]] | None = None

    def within(self, space: Space) -> Simulator:
        """The same for candidates of another space."""
        return Simulator(self.model, self.captures, space, self.blocks)

    def outcomes(self, group: Group) -> list[Outcome]:
        """Those of all candidates of `group` that can be had."""
        self._several = True  # after the first, most of each program is there
        found = list(map(self.outcome, self.space.candidates(group)))
        self._several, self._started = False, None
        return [outcome for outcome in found if outcome is not None]

    def outcome(self, candidate: Candidate) -> Outcome | None:
        """That of `candidate`; None if the model cannot be sharded so."""
        if candidate not in self.known:
            self.known[candidate] = self._outcome(candidate)
        return self.known[candidate]

    def _outcome(self, candidate: Candidate) -> Outcome | None:
        try:
            plan = self.plan(candidate)
            captured = self.captures.of(plan)
            passes = default_passes(plan.policy)
            key = (id(captured), plan.units, plan.recomputed, plan.ignored, passes)
            if key not in self._by_program:
                estimate = self.estimate(plan, captured, passes)
                self._by_program[key] = Outcome.of(candidate, estimate)
                if self.estimates is not None:
                    self.estimates[candidate] = estimate
        except (CaptureError, PolicyError, PlanError, PassError):
            return None
        found = replace(self._by_program[key], candidate=candidate)
        budget = plan.policy.memory_budget
        if budget is not None and found.step_bytes > budget:
            return None  # recomputing all it may is not enough: the program would be refused
        return found

    def rung(self, ladder: Ladder, step: int) -> Outcome | None:
        """That of the rung `step` of `ladder`, of those between 0 and `RUNGS`."""
        ends = self.ends(ladder)
        if ends is None:
            return None
        low, high = ends
        return self.outcome(ladder.rung(rounded(low + (high - low) * step // RUNGS)))

    def ends(self, ladder: Ladder) -> tuple[int, int] | None:
        """Bytes with all regions recomputed, and with none; None if that saves nothing."""
        least, most = self.outcome(ladder.least), self.outcome(ladder.most)
        if least is None or most is None or least.step_bytes >= most.step_bytes:
            return None
        return least.step_bytes, most.step_bytes

    def sweep(self) -> None:
        """Collect what is not needed any more."""
        gc.collect(1)

    def plan(self, candidate: Candidate) -> ShardingPlan:
        """The plan of `candidate`, without a program."""
        return self.plan_of(self.space.policy(candidate, self.blocks))

    def plan_of(self, policy: Policy) -> ShardingPlan:
        """The plan of `policy`, without a program."""
        mesh = self.space.mesh_shape
        ranks = 1
        for size in mesh:
            ranks *= size
        return make_plan(self.model, policy, world_size=ranks, mesh_shape=mesh)

    def estimate(
        self, plan: ShardingPlan, captured: Program, passes: Sequence[PassLike] | None = None
    ) -> Estimate:
        """Rewrite a copy of `captured` by `plan` and simulate it."""
        passes = default_passes(plan.policy) if passes is None else passes
        self.simulated += 1
        program = self._rewritten(plan, captured, passes)
        return estimate_of(
            replace(plan, program=program),
            self.space.hardware,
            optimizer=self.space.auto.optimizer,
        )

    def _rewritten(
        self, plan: ShardingPlan, captured: Program, passes: Sequence[PassLike]
    ) -> Program:
        cut = len(passes)
        if self._several:
            cut = next(i for i, step in enumerate(passes) if isinstance(step, Prefetch))
        head = [(step, passes[place + 1 :]) for place, step in enumerate(passes[:cut])]
        tried = [one.rehearsed(rest) for one, rest in head if isinstance(one, RehearsingPass)]
        kinds = (tuple(passes[:cut]), tuple(tried))
        key = (id(captured), plan.units, plan.recomputed, plan.ignored, *kinds)
        if self._started is None or self._started.key != key:
            self._started = None
            program = captured.copy()
            program.stale = plan.stale_after_step
            assign_units(program, plan)
            for step, following in head:
                with_memo = self._with_memo(step, following, captured, plan)
                apply_pass(with_memo, program, plan, following)
            if not self._several:
                return program
            self._started = _Started(key, program)
        program = self._started.program.copy()
        apply_passes(passes[cut:], program, plan)
        return program

    def _with_memo(
        self,
        step: PassLike,
        following: Sequence[PassLike],
        captured: Program,
        plan: ShardingPlan,
    ) -> PassLike:
        """Budgets for one plan share what does not depend on them; the last plan's is kept."""
        if not isinstance(step, RecomputeToBudget):
            return step
        rest = step.rehearsed(following)
        key = (id(captured), plan.units, plan.recomputed, plan.ignored, rest, step.classes)
        if self._memo is None or self._memo[0] != key:
            self._memo = (key, [])
        return replace(step, memo=self._memo[1])


@contextmanager
def without_collecting() -> Iterator[None]:
    """Keep Python's collector from walking what stays; `Simulator.sweep` collects what goes."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    if not frozen:
        gc.collect()
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        if not frozen:
            gc.unfreeze()
