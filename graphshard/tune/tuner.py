"""The stages of tuning, in order: capture, search, compare the neighbours, verify the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from graphshard.cost.estimate import Estimate
from graphshard.errors import PolicyError
from graphshard.pipeline import passes_of, with_capture_warnings
from graphshard.planning.model_checks import check_model, require_module
from graphshard.planning.planner import checked_mesh, ignored_by, mesh_sizes
from graphshard.policy.base import Policy
from graphshard.policy.strategy import Strategy
from graphshard.policy.tree import ModuleTree
from graphshard.program.pass_protocol import stages_of
from graphshard.progress import Progress, Stages
from graphshard.torch_private.gc_pause import collect_only_new
from graphshard.tune.reasons import advice, out_of_time, settle
from graphshard.tune.request import PolicyRequest, is_auto
from graphshard.tune.search import Search, TimeLimit
from graphshard.tune.simulator import Captures, Simulator
from graphshard.tune.space import Blocks, Space
from graphshard.tune.tuning import CandidateResult, PolicyResult, Tuning
from graphshard.verify.rules import verify


def tune(
    auto: PolicyRequest,
    model: nn.Module,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | str | None = None,
    device: torch.device | str | None = None,
    progress: Stages | None = None,
    captures: Captures | None = None,
    faster_than: float | None = None,
) -> Tuning:
    """See `AutoPolicy.tune`.

    `captures` are the captured programs of the call, if searches share them; a step must take less
    than `faster_than` seconds.
    """
    require_module(model)
    if example_inputs is None and example_kwargs is None:
        raise PolicyError(
            "AutoPolicy finds a policy by simulating a call of the model; give example_inputs or "
            "example_kwargs, or an explicit policy"
        )
    limit = TimeLimit(auto.seconds)
    mesh = _mesh(auto, world_size, mesh_shape)
    progress = progress or Progress()
    tree = ModuleTree(model, ignored_by(Policy(ignored=auto.ignored), model).params)
    check_model(tree, prod(mesh))
    space = Space(auto, Blocks(tree), mesh, auto.described())
    if captures is None:
        device = device or space.hardware.program_device
        args, kwargs = tuple(example_inputs or ()), example_kwargs or {}
        captures = Captures(model, args, kwargs, device, progress)
    with progress.stage("tune"):
        with progress.stage("capture"):
            simulator = Simulator(captures, space)
            first = space.candidates(space.groups()[0])[0]
            captures.like(simulator.plan(first))
        with collect_only_new():
            search = Search(simulator, space.budget, limit, progress, faster_than)
            winner = search.run()
            if winner is None:
                raise PolicyError(out_of_time(search) if search.untried else advice(search))
            with progress.stage("compare the neighbours"):
                winner, why = settle(search, winner)
        return _tuning(search, winner, why, progress)


def _mesh(
    auto: PolicyRequest, world_size: int | None, mesh_shape: Sequence[int] | str | None
) -> tuple[int, ...]:
    if world_size is None and mesh_shape is None:
        raise PolicyError("AutoPolicy needs a number of ranks; give world_size= or mesh_shape=")
    shape = None if mesh_shape is None else mesh_sizes(mesh_shape)
    ranks = torch.Size(shape or (1,)).numel() if world_size is None else world_size
    strategy = Strategy.FULL_SHARD if is_auto(auto.strategy) else Strategy(auto.strategy)
    return checked_mesh(ranks, shape, Policy(strategy=strategy))


def _tuning(
    search: Search, winner: CandidateResult, why: Mapping[str, str], progress: Stages
) -> Tuning:
    space = search.space

    def policy_result(result: CandidateResult) -> PolicyResult:
        policy = space.policy(result.candidate)
        return PolicyResult(policy, result.seconds, result.peak)

    results = search.results.values()
    ranked = sorted(results, key=lambda result: (result.seconds, result.peak))
    estimate = _verify(search, winner, progress)
    policy = estimate.plan.policy
    frontier = [winner]
    for result in ranked:
        if result.seconds >= winner.seconds and result.peak < frontier[-1].peak:
            frontier.append(result)
    skipped = {
        "too large": len(search.too_large),
        "too slow": len(set(search.too_slow)),
        "impossible": len(search.impossible),
    }
    tried = {replace(result.candidate.group, budget=None) for result in results}
    untried = list(dict.fromkeys(search.untried))
    if untried:
        skipped["not tried"] = len(untried)
    return Tuning(
        policy=policy,
        estimate=estimate,
        memory_budget=search.budget,
        frontier=tuple(map(policy_result, frontier)),
        tried=tuple(map(policy_result, ranked)),
        reasons=dict(why),
        groups={"simulated": len(tried), **skipped},
        simulations=search.simulator.simulated,
        untried=tuple(map(space.policy, untried)),
        micro_batches=space.auto.micro_batches,
        further_bytes=space.further_bytes(estimate),
        stopped_after=search.limit.seconds if search.cut else None,
    )


def _verify(search: Search, winner: CandidateResult, progress: Stages) -> Estimate:
    """Return the estimate of the winner's policy, after verifying its program.

    It is verified once, after all passes; `compile` with the policy verifies after every pass.
    """
    simulator, space = search.simulator, search.space
    plan = simulator.plan_of(space.policy(winner.candidate))
    estimate = simulator.estimate(plan, simulator.captures.of(plan))
    plan = with_capture_warnings(estimate.plan, simulator.captures.of(estimate.plan))
    with progress.stage("verify"):
        passes = passes_of(plan)
        verify(estimate.program, plan, after=passes[-1].name, done=stages_of(*passes))
    return replace(estimate, plan=replace(plan, program=estimate.program))
