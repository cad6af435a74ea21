"""From what `compile` and `plan` are given for a policy to an explicit one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphshard.errors import PlanError
from graphshard.inspect.units_text import human_bytes, human_seconds
from graphshard.pipeline import Stages
from graphshard.plan import ShardingPlan
from graphshard.policy_base import Policy
from graphshard.strategy import Strategy
from graphshard.tune.auto_policy import AutoPolicy, is_auto
from graphshard.tune.tuner import tune
from graphshard.tune.tuning import Tuning


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
