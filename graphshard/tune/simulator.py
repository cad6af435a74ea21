"""Capture the programs of candidates, run their passes, and estimate time and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from graphshard.capture.casting import cast_all
from graphshard.capture.entry import capture
from graphshard.cost.estimate import Estimate, estimate_of
from graphshard.cost.op_cost import op_cost
from graphshard.errors import CaptureError, PassError, PlanError, PolicyError
from graphshard.passes.recompute_budget import RecomputeToBudget
from graphshard.pipeline import passes_of
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan
from graphshard.policy.base import Policy
from graphshard.policy.precision import Precisions
from graphshard.program.pass_protocol import PassLike, apply_passes
from graphshard.program.program import Program
from graphshard.program.spans import assign_units
from graphshard.progress import Stages
from graphshard.tune.space import PLAIN, Candidate, Space
from graphshard.tune.tuning import CandidateResult


class Captures:
    """Captured programs of one call of `model`, shared between plans where possible; see README.md.

    A precision that casts outputs, or differs between units, gets a program per plan.

    Args:
        model: on any device.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        device: the device to capture for.
        progress: shows each capture.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device | str,
        progress: Stages | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, tuple(args), dict(kwargs)
        self.device, self.progress = device, progress
        self._shared: Program | None = None  # with casts at the root alone
        self._may_share = True
        self._cast: frozenset[str] = frozenset()  # modules at which a unit would cast
        self._by_units: dict[tuple[str, ...], Program] = {}

    def of(self, plan: ShardingPlan) -> Program:
        """Return the captured program for `plan`; the caller must not edit it."""
        shared = self._shared_program(plan)
        if shared is None:
            return self._of_units(plan, tuple(unit.fqn for unit in plan.units))
        casting = tuple(unit.fqn for unit in plan.units if unit.fqn in self._cast)
        return self._of_units(plan, casting) if casting else shared

    def like(self, plan: ShardingPlan) -> Program:
        """Return a captured program that may differ from that of `plan` by casts alone."""
        return self._shared_program(plan) or self.of(plan)

    def _shared_program(self, plan: ShardingPlan) -> Program | None:
        """The program with casts at the root alone; None if `plan` cannot use it."""
        if not _same_everywhere(plan.precisions):
            return None
        if self._shared is None and self._may_share:
            try:
                self._shared = self._capture_root_casts(plan.precisions)
            except CaptureError:  # the model does not run without casts at units
                self._may_share = False
        return self._shared

    @property
    def count(self) -> int:
        """Number of captured programs."""
        return (self._shared is not None) + len(self._by_units)

    def _of_units(self, plan: ShardingPlan, units: tuple[str, ...]) -> Program:
        if units not in self._by_units:
            self._by_units[units] = self._capture(plan.precisions)
        return self._by_units[units]

    def _capture_root_casts(self, precisions: Precisions | None) -> Program:
        if precisions is None:
            return self._capture(None)
        cast_modules: set[str] = set()
        precision = precisions.units[""]
        assert precision is not None
        dtype = precision.param_dtype if precision.cast_forward_inputs else None
        with _recording_casts(self.model, dtype, cast_modules):
            program = self._capture(replace(precisions, units={"": precision}))
        self._cast = frozenset(cast_modules - {""})
        return program

    def _capture(self, precisions: Precisions | None) -> Program:
        program = capture(
            self.model,
            self.args,
            dict(self.kwargs),
            device=self.device,
            precisions=precisions,
            progress=self.progress,
        ).program
        for node in program.nodes():
            op_cost(node)  # copies of the program keep the cached costs of its nodes
        return program


def _same_everywhere(precisions: Precisions | None) -> bool:
    """Whether all units share one precision that casts no outputs."""
    if precisions is None:
        return True
    kinds = set(precisions.units.values())
    precision = precisions.units.get("")
    return len(kinds) == 1 and precision is not None and precision.output_dtype is None


@contextlib.contextmanager
def _recording_casts(
    model: nn.Module, dtype: torch.dtype | None, cast_modules: set[str]
) -> Iterator[None]:
    """Add the FQNs of modules whose inputs a cast to `dtype` would change to `cast_modules`."""
    if dtype is None:
        yield
        return

    def hook(fqn: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = (args, kwargs)
            if cast_all(inputs, dtype) is not inputs:
                cast_modules.add(fqn)

        return before

    handles = [
        module.register_forward_pre_hook(hook(fqn), prepend=True, with_kwargs=True)
        for fqn, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Simulator:
    """Simulates candidates for one model, each once; their programs are not verified.

    Args:
        captures: its captured programs.
        space: the candidates.
    """

    def __init__(self, captures: Captures, space: Space) -> None:
        self.captures, self.space = captures, space
        self.simulated = 0
        self.results_of: dict[Candidate, CandidateResult | None] = {}
        self._by_program: dict[Any, CandidateResult] = {}
        self._memo: tuple[Any, list[Any]] | None = None

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
        plan = make_plan(self.captures.model, policy, world_size=ranks, mesh_shape=mesh)
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
