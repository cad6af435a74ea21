"""`graphshard report`: its arguments, and the other policies that its page compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from graphshard.cli.machine import check_attention
from graphshard.cli.simulate import add_hardware_options, estimate_of
from graphshard.cost.estimate import Estimate
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.progress import Progress
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.tuning import Tuning

_COMPARED = 8
"""Policies of the frontier that are compared; the others are points without reasons."""

_KEPT = (
    "mixed_precision",
    "ignored",
    "cuda_graph",
    "check_finite",
    "sync_module_states",
)
"""Fields of the policy that the search for other ones does not vary."""


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard report` to `command`."""
    add_hardware_options(command)
    command.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="the HTML file to write"
    )
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="set a trace of torch.profiler beside it"
    )
    command.add_argument(
        "--what-if",
        action="store_true",
        help="search other policies, as tune does, and set them beside it",
    )


def write_report(
    loaded: Any,
    options: argparse.Namespace,
    progress: Progress,
    plan_under: Callable[[Policy | None], ShardingPlan],
) -> str:
    """Write the page and return its path.

    Args:
        loaded: the model and its example inputs.
        options: of the command.
        progress: shows each stage.
        plan_under: makes the plan, with its program, of a policy; None: of that in `options`.
    """
    plan = plan_under(None)
    with progress.stage("simulate"):
        estimate = estimate_of(plan, options)
        check_attention(options, [estimate])
    others: dict[str, Estimate] = {}
    tuning = None
    if options.what_if:
        tuning = _search(loaded.model, loaded.args, loaded.kwargs, plan, options, progress)
        for number, result in enumerate(tuning.frontier[:_COMPARED], 1):
            if repr(result.policy) != repr(plan.policy):
                others[f"frontier {number}"] = estimate_of(plan_under(result.policy), options)
    with progress.stage("write the page"):
        estimate.report(options.out, what_if=others, tuning=tuning, trace=options.trace)
    return str(options.out)


def _search(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: ShardingPlan,
    options: argparse.Namespace,
    progress: Progress,
) -> Tuning:
    auto = AutoPolicy(
        hardware=options.hardware,
        gpus_per_node=options.gpus_per_node,
        optimizer=options.optimizer,
        allocator=options.allocator,
        **{name: getattr(plan.policy, name) for name in _KEPT},
    )
    return auto.tune(
        model,
        example_inputs=args,
        example_kwargs=kwargs,
        world_size=options.world_size,
        mesh_shape=options.mesh,
        progress=progress,
    )
