"""The stages of tuning, in order: capture, search, verify what was found, say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphshard.cost.estimate import Estimate
from graphshard.errors import PlanError, PolicyError
from graphshard.format import human_bytes, human_seconds
from graphshard.pipeline import default_passes, with_capture_warnings
from graphshard.planning.ignored import ignored_by
from graphshard.planning.mesh import checked_mesh
from graphshard.planning.model_checks import check_model, require_module
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree
from graphshard.program.pass_protocol import stages_of
from graphshard.progress import Progress, Stages
from graphshard.tune.auto_policy import AutoPolicy, is_auto
from graphshard.tune.blocks import Blocks
from graphshard.tune.captures import Captures
from graphshard.tune.reasons import advice, reasons
from graphshard.tune.search import Search, frontier_of
from graphshard.tune.simulator import Simulator, without_collecting
from graphshard.tune.space import Space
from graphshard.tune.tuning import Outcome, Tried, Tuning
from graphshard.verify.rules import verify


def tune(
    auto: AutoPolicy,
    model: nn.Module,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    progress: Stages | None = None,
) -> Tuning:
    """See `AutoPolicy.tune`."""
    require_module(model)
    if example_inputs is None and example_kwargs is None:
        raise PolicyError(
            "AutoPolicy finds a policy by simulating a call of the model; give example_inputs or "
            "example_kwargs, or an explicit policy"
        )
    mesh = _mesh(auto, world_size, mesh_shape)
    progress = progress or Progress()
    tree = ModuleTree(model, ignored_by(Policy(ignored=auto.ignored), model).params)
    check_model(tree)
    space = Space(auto, Blocks(tree), mesh, auto.described())
    captures = Captures(model, tuple(example_inputs or ()), example_kwargs or {}, device)
    with progress.stage("tune"):
        with progress.stage("capture"):
            simulator = Simulator(model, captures, space, space.blocks.fqns)
            first = space.candidates(space.groups()[0])[0]
            captures.like(simulator.plan(first))
        with without_collecting():
            search = Search.of(simulator, auto.budget(space.hardware))
            search.progress = progress
            winner = search.run()
            if winner is None:
                raise PolicyError(advice(search))
            with progress.stage("compare the neighbours"):
                why = reasons(search, winner)
        return _tuning(search, winner, why, progress)


def _mesh(
    auto: AutoPolicy, world_size: int | None, mesh_shape: Sequence[int] | None
) -> tuple[int, ...]:
    if world_size is None and mesh_shape is None:
        raise PolicyError("AutoPolicy needs a number of ranks; give world_size= or mesh_shape=")
    shape = None if mesh_shape is None else tuple(mesh_shape)
    ranks = torch.Size(shape or (1,)).numel() if world_size is None else world_size
    strategy = Strategy.FULL_SHARD if is_auto(auto.strategy) else Strategy(auto.strategy)
    return checked_mesh(ranks, shape, Policy(strategy=strategy))


def _tuning(search: Search, winner: Outcome, why: Mapping[str, str], progress: Stages) -> Tuning:
    space = search.space

    def tried(outcome: Outcome) -> Tried:
        policy = space.policy(outcome.candidate)
        return Tried(policy, outcome.seconds, outcome.peak, outcome.whole)

    everything = {**search.tried, **search.whole}.values()
    ranked = sorted(everything, key=lambda outcome: (outcome.seconds, outcome.peak))
    estimate = _verified(search, winner, progress)
    policy = estimate.plan.policy
    frontier = frontier_of(search.whole.values())
    shallow = search.shallow
    simulations = search.simulator.simulated + (0 if shallow is None else shallow.simulated)
    skipped = {
        "too large": len(search.too_large),
        "too slow": len(search.too_slow),
        "impossible": len(search.impossible),
    }
    known = len({outcome.candidate.group for outcome in everything})
    return Tuning(
        policy=policy,
        estimate=estimate,
        memory_budget=search.budget,
        frontier=tuple(map(tried, frontier)),
        tried=tuple(map(tried, ranked)),
        reasons=dict(why),
        groups={"simulated": known, **skipped},
        simulations=simulations,
    )


def _verified(search: Search, winner: Outcome, progress: Stages) -> Estimate:
    """The estimate of the policy found, on a program that is verified.

    That is done once, after all passes: compiling with the policy does it after every pass.
    """
    simulator, space = search.simulator, search.space
    estimate = (simulator.estimates or {}).get(winner.candidate)
    if estimate is None:
        plan = simulator.plan_of(space.policy(winner.candidate))
        estimate = simulator.estimate(plan, simulator.captures.of(plan))
    plan = with_capture_warnings(estimate.plan, simulator.captures.of(estimate.plan))
    with progress.stage("verify"):
        passes = default_passes(plan.policy)
        verify(estimate.program, plan, after=passes[-1].name, done=stages_of(*passes))
    return replace(estimate, plan=replace(plan, program=estimate.program))


def wants_groups(policy: Policy | AutoPolicy) -> bool:
    """Whether `policy` needs a mesh of two dimensions."""
    if isinstance(policy, AutoPolicy) and is_auto(policy.strategy):
        return False
    return Strategy(policy.strategy).hybrid


def searched(
    auto: AutoPolicy,
    model: nn.Module,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    world_size: int,
    mesh_shape: Sequence[int] | None,
    device: torch.device | str,
    progress: Stages,
) -> ShardingPlan:
    """The plan, with its program, of the policy that a search finds, which has a note of it.

    Raises:
        PolicyError: there are no example inputs to search with, or nothing fits.
        PlanError: the model cannot be planned, or is not to be trained.
    """
    if not model.training or not torch.is_grad_enabled():
        raise PlanError(
            "AutoPolicy looks for the fastest training step; call model.train() first, and not in "
            "torch.no_grad(), or give an explicit policy"
        )
    found = tune(
        auto,
        model,
        example_inputs,
        example_kwargs,
        world_size=world_size,
        mesh_shape=mesh_shape,
        device=device,
        progress=progress,
    )
    policy = replace(found.policy, notes=(*found.policy.notes, _note(found)))
    return replace(found.plan, policy=policy)


def _note(tuning: Tuning) -> str:
    estimate = tuning.estimate
    return (
        f"tuned for {human_bytes(tuning.memory_budget)} on {estimate.hardware.name}: "
        f"{human_seconds(estimate.step_seconds)} a step, "
        f"{human_bytes(estimate.peak_bytes)} at the peak"
    )
