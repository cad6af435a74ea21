"""`graphshard simulate`: its arguments, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from graphshard.cost.estimate import simulate
from graphshard.cost.hardware import preset_names
from graphshard.cost.memory import OPTIMIZERS
from graphshard.plan import ShardingPlan


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard simulate` to `command`."""
    command.add_argument(
        "--hardware",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(preset_names())}, or a file of Hardware.save",
    )
    command.add_argument("--gpus-per-node", type=int, metavar="N", help="as the hardware says")
    command.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    command.add_argument("--tf32", action="store_true", help="float32 products run as TF32")
    command.add_argument("--json", action="store_true", help="print the estimate as JSON")
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw streams and memory (needs matplotlib)"
    )


def shown_estimate(plan: ShardingPlan, options: argparse.Namespace) -> str:
    """The estimate for the program of `plan`, as text; writes the files asked for."""
    estimate = simulate(
        plan,
        hardware=options.hardware,
        gpus_per_node=options.gpus_per_node,
        optimizer=options.optimizer,
        tf32=options.tf32,
    )
    if options.trace:
        estimate.save_trace(options.trace)
    if options.plot:
        estimate.plot(options.plot)
    return json.dumps(estimate.to_dict(), indent=2) if options.json else str(estimate)
