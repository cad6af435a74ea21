"""`graphshard simulate`, `compare`, `compare-trace` and `report`: arguments and output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from graphshard.cli.model import load_with_inputs, plan_of
from graphshard.cli.policy import add_machine_options, backend_of, check_attention, policies_of
from graphshard.cli.tune import auto_policy_with, tuned
from graphshard.cost.against_trace import compare_trace
from graphshard.cost.compare import compare
from graphshard.cost.estimate import Estimate
from graphshard.cost.plot import draw_beside
from graphshard.errors import PlanError, PolicyError
from graphshard.planning.plan import ShardingPlan
from graphshard.progress import Progress
from graphshard.simulation import simulate


def _add_hardware_options(command: argparse.ArgumentParser, *, required: bool = False) -> None:
    add_machine_options(command, required=required)
    command.add_argument("--tf32", action="store_true", help="float32 products run as TF32")


def _estimates(options: argparse.Namespace, *plans: ShardingPlan) -> list[Estimate]:
    estimates = [
        simulate(
            plan,
            hardware=options.hardware,
            gpus_per_node=options.gpus_per_node,
            optimizer=options.optimizer,
            tf32=options.tf32,
            allocator=options.allocator,
        )
        for plan in plans
    ]
    check_attention(options, estimates)
    return estimates


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard simulate` to `command`."""
    _add_hardware_options(command)
    command.add_argument("--json", action="store_true", help="print the estimate as JSON")
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw streams and memory (needs matplotlib)"
    )
    command.set_defaults(run=run_simulate)


def run_simulate(options: argparse.Namespace, progress: Progress) -> str:
    """Write the requested files and return the estimate."""
    plan = plan_of(options, load_with_inputs(options, progress, "simulation"), progress)
    with progress.stage("simulate"):
        (estimate,) = _estimates(options, plan)
        if options.trace:
            estimate.save_trace(options.trace)
        if options.plot:
            estimate.plot(options.plot)
        return json.dumps(estimate.to_dict(), indent=2) if options.json else str(estimate)


def add_compare(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard compare`, except those of the policies, to `command`."""
    _add_hardware_options(command)
    command.add_argument("--json", action="store_true", help="print both estimates as JSON")
    command.set_defaults(run=run_compare)


def run_compare(options: argparse.Namespace, progress: Progress) -> str:
    """Return the estimates of two policies side by side."""
    if len(options.policy) != 2:
        raise PolicyError(f"two policies are compared; --policy was given {len(options.policy)}x")
    policies = policies_of(options)
    loaded = load_with_inputs(options, progress, "comparison")
    plans = [plan_of(options, loaded, progress, policy) for policy in policies]
    with progress.stage("simulate"):
        comparison = compare(*_estimates(options, *plans))
        if options.json:
            return json.dumps(comparison.to_dict(), indent=2)
        named = zip(comparison.names, options.policy, strict=True)
        return "\n".join([*(f"{name}: {text}" for name, text in named), str(comparison)])


def add_compare_trace(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard compare-trace` to `command`."""
    command.add_argument(
        "--trace",
        required=True,
        type=Path,
        nargs="+",
        metavar="FILE",
        help="what torch.profiler wrote of each rank (export_chrome_trace); .json or .json.gz",
    )
    _add_hardware_options(command, required=True)
    command.add_argument("--events", action="store_true", help="a line for every event")
    command.add_argument("--json", action="store_true", help="print the comparisons as JSON")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the steps (needs matplotlib)"
    )
    command.set_defaults(run=run_compare_trace)


def run_compare_trace(options: argparse.Namespace, progress: Progress) -> str:
    """Return what traces measured beside the predicted step."""
    plan = plan_of(options, load_with_inputs(options, progress, "comparison"), progress)
    with progress.stage("simulate"):
        (estimate,) = _estimates(options, plan)
        comparisons = [compare_trace(estimate, path) for path in options.trace]
        if options.plot:
            draw_beside(comparisons, options.plot)
        if options.json:
            data = [comparison.to_dict() for comparison in comparisons]
            return json.dumps(data if len(data) > 1 else data[0], indent=2)
        return "\n\n".join(c.text(every_event=options.events) for c in comparisons)


_COMPARED = 8
"""Policies of the frontier that are compared; the others are points without reasons."""

_KEPT = (
    "mixed_precision",
    "gather_unused",
    "ignored",
    "cuda_graph",
    "check_finite",
    "sync_module_states",
)
"""Fields of the policy that the search for other ones does not vary."""


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard report` to `command`."""
    _add_hardware_options(command)
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
    command.set_defaults(run=run_report)


def run_report(options: argparse.Namespace, progress: Progress) -> str:
    """Write the page, and return its path."""
    if options.out.is_dir():
        raise PlanError(f"--out is a file to write; {options.out} is a folder")
    loaded = load_with_inputs(options, progress, "report")
    plan = plan_of(options, loaded, progress)
    with progress.stage("simulate"):
        (estimate,) = _estimates(options, plan)
    others: dict[str, Estimate] = {}
    tuning = None
    if options.what_if:
        kept = {name: getattr(plan.policy, name) for name in _KEPT}
        tuning = tuned(auto_policy_with(options, **kept), loaded, options, progress)
        for number, result in enumerate(tuning.frontier[:_COMPARED], 1):
            if repr(result.policy) != repr(plan.policy):
                other = plan_of(options, loaded, progress, (result.policy, backend_of(options)))
                (others[f"frontier {number}"],) = _estimates(options, other)
    with progress.stage("write the page"):
        estimate.report(options.out, what_if=others, tuning=tuning, trace=options.trace)
    return str(options.out)
