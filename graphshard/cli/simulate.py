"""`graphshard simulate` and `compare`: their arguments and their output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from graphshard.cli.machine import add_machine_options, check_attention
from graphshard.cost.compare import compare
from graphshard.cost.estimate import Estimate
from graphshard.cost.memory import OPTIMIZERS
from graphshard.hardware.hardware import preset_names
from graphshard.planning.plan import ShardingPlan
from graphshard.simulation import simulate


def add_hardware_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments for the hardware, the optimizer and TF32 to `command`."""
    command.add_argument(
        "--hardware",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(preset_names())}, or a file of Hardware.save",
    )
    command.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="ranks on a node; as the hardware says"
    )
    add_machine_options(command)
    command.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    command.add_argument("--tf32", action="store_true", help="float32 products run as TF32")
    command.add_argument(
        "--allocator",
        default="",
        metavar="SETTINGS",
        help="what PYTORCH_CUDA_ALLOC_CONF will be, such as expandable_segments:True",
    )


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard simulate` to `command`."""
    add_hardware_options(command)
    command.add_argument("--json", action="store_true", help="print the estimate as JSON")
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw streams and memory (needs matplotlib)"
    )


def add_compare(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard compare`, except those of the policies, to `command`."""
    add_hardware_options(command)
    command.add_argument("--json", action="store_true", help="print both estimates as JSON")


def estimate_text(plan: ShardingPlan, options: argparse.Namespace) -> str:
    """Return the estimate for the program of `plan` as text, and write the requested files."""
    estimate = estimate_of(plan, options)
    check_attention(options, [estimate])
    if options.trace:
        estimate.save_trace(options.trace)
    if options.plot:
        estimate.plot(options.plot)
    return json.dumps(estimate.to_dict(), indent=2) if options.json else str(estimate)


def comparison_text(
    plans: Sequence[ShardingPlan], texts: Sequence[str], options: argparse.Namespace
) -> str:
    """Return the estimates for the programs of two plans side by side, as text."""
    estimates = [estimate_of(plan, options) for plan in plans]
    check_attention(options, estimates)
    comparison = compare(*estimates)
    if options.json:
        return json.dumps(comparison.to_dict(), indent=2)
    legend = [f"{name}: {text}" for name, text in zip(comparison.names, texts, strict=True)]
    return "\n".join([*legend, str(comparison)])


def estimate_of(plan: ShardingPlan, options: argparse.Namespace) -> Estimate:
    """The estimate for the program of `plan` with the options of `add_hardware_options`."""
    return simulate(
        plan,
        hardware=options.hardware,
        gpus_per_node=options.gpus_per_node,
        optimizer=options.optimizer,
        tf32=options.tf32,
        allocator=options.allocator,
    )
