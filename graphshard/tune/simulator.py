"""Simulate candidates: run the passes on a captured program and estimate time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from graphshard.cost.estimate import Estimate, estimate_of
from graphshard.errors import CaptureError, PassError, PlanError, PolicyError
from graphshard.passes.recompute_budget import RecomputeToBudget
from graphshard.pipeline import passes_of
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan
from graphshard.policy.base import Policy
from graphshard.program.pass_protocol import PassLike, apply_passes
from graphshard.program.program import Program
from graphshard.program.spans import assign_units
from graphshard.tune.captures import Captures
from graphshard.tune.space import PLAIN, Candidate, Space
from graphshard.tune.tuning import CandidateResult


class Simulator:
    """Simulates candidates for one model, each once; their programs are not verified.

    Args:
        model: on any device.
        captures: its captured programs.
        space: the candidates.
    """

    def __init__(self, model: nn.Module, captures: Captures, space: Space) -> None:
        self.model, self.captures, self.space = model, captures, space
        self.simulated = 0
        self.results_of: dict[Candidate, CandidateResult | None] = {}
        self._by_program: dict[Any, CandidateResult] = {}
        self._memo: tuple[Any, list[Any]] | None = None

    def in_space(self, space: Space) -> Simulator:
        """Return a simulator of the same model for candidates of another space."""
        return Simulator(self.model, self.captures, space)

    def result(self, candidate: Candidate) -> CandidateResult | None:
        """Return the result of `candidate`; None if the model cannot be sharded so."""
        if candidate not in self.results_of:
            self.results_of[candidate] = self._simulate(candidate)
        return self.results_of[candidate]

    def _simulate(self, candidate: Candidate) -> CandidateResult | None:
        try:
            plan = self.plan(candidate)
            captured = self.captures.of(plan)
            passes = passes_of(plan)
            key: tuple[Any, ...] = (
                id(captured),
                plan.units,
                plan.recomputed,
                plan.ignored,
                passes,
            )
            if plan.policy.schedule != PLAIN:
                key = (*key, plan.policy.memory_budget)  # which its passes read off the plan
            elif isinstance(passes[0], RecomputeToBudget):
                # Budgets that choose the same nodes give the same program.
                chosen = self._chosen(passes[0], passes[1:], captured, plan)
                key = (*key[:-1], passes[0].classes, chosen, passes[1:])
            if key not in self._by_program:
                estimate = self.estimate(plan, captured, passes)
                self._by_program[key] = CandidateResult.of(
                    candidate,
                    estimate,
                    self.space.auto.micro_batches,
                    self.space.further_bytes(estimate),
                )
        except (CaptureError, PolicyError, PlanError, PassError):
            return None
        result = replace(self._by_program[key], candidate=candidate)
        budget = plan.policy.memory_budget
        if budget is not None and result.step_bytes > budget:
            return None  # even full recomputation does not fit: verify would refuse the program
        return result

    def plan(self, candidate: Candidate) -> ShardingPlan:
        """Return the plan of `candidate`, without a program."""
        return self.plan_of(self.space.policy(candidate))

    def plan_of(self, policy: Policy) -> ShardingPlan:
        """Return the plan of `policy`, without a program."""
        mesh = self.space.mesh_shape
        ranks = prod(mesh)
        plan = make_plan(self.model, policy, world_size=ranks, mesh_shape=mesh)
        hardware = self.space.hardware
        backend = hardware.process_group_backend if ranks > 1 else "none"
        hosts = hardware.nodes(ranks) if backend == "gloo" else 1
        return replace(plan, process_group_backend=backend, hosts=hosts)

    def estimate(
        self, plan: ShardingPlan, captured: Program, passes: Sequence[PassLike] | None = None
    ) -> Estimate:
        """Rewrite a copy of `captured` for `plan` and simulate it."""
        passes = passes_of(plan) if passes is None else passes
        self.simulated += 1
        program = captured.copy()
        program.stale = plan.stale_after_step
        assign_units(program, plan)
        first, *following = passes
        if isinstance(first, RecomputeToBudget):
            first = self._with_memo(first, following, captured, plan)
        apply_passes((first, *following), program, plan)
        return estimate_of(
            replace(plan, program=program),
            self.space.hardware,
            optimizer=self.space.auto.optimizer,
            allocator=self.space.auto.allocator,
        )

    def _chosen(
        self,
        step: RecomputeToBudget,
        following: Sequence[PassLike],
        captured: Program,
        plan: ShardingPlan,
    ) -> frozenset[str]:
        """The names of the nodes that `step` recomputes."""
        step = self._with_memo(step, following, captured, plan)
        program = captured
        if not step.memo:
            program = captured.copy()
            assign_units(program, plan)
        return step.chosen(program, plan, step.rehearsed(following))

    def _with_memo(
        self,
        step: RecomputeToBudget,
        following: Sequence[PassLike],
        captured: Program,
        plan: ShardingPlan,
    ) -> RecomputeToBudget:
        """Give `step` a memo shared by all budgets of one plan; keep the last one."""
        rest = step.rehearsed(following)
        key = (
            id(captured),
            plan.units,
            plan.recomputed,
            plan.ignored,
            rest,
            step.classes,
            step.keep_draws,
        )
        if self._memo is None or self._memo[0] != key:
            self._memo = (key, [])
        return replace(step, memo=self._memo[1])
