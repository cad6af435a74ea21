"""`graphshard compare-trace`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from graphshard.cli.machine import check_attention
from graphshard.cli.simulate import add_hardware_options, estimate_of
from graphshard.cost.against_trace import compare_trace
from graphshard.planning.plan import ShardingPlan


def add_compare_trace(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard compare-trace` to `command`."""
    command.add_argument(
        "--trace",
        required=True,
        type=Path,
        metavar="FILE",
        help="what torch.profiler wrote of one rank (export_chrome_trace); .json or .json.gz",
    )
    add_hardware_options(command)
    command.add_argument("--events", action="store_true", help="a line for every event")
    command.add_argument("--json", action="store_true", help="print the comparison as JSON")


def trace_text(plan: ShardingPlan, options: argparse.Namespace) -> str:
    """Return what the trace measured beside the estimate for the program of `plan`, as text."""
    estimate = estimate_of(plan, options)
    check_attention(options, [estimate])
    comparison = compare_trace(estimate, options.trace)
    if options.json:
        return json.dumps(comparison.to_dict(), indent=2)
    return comparison.text(every_event=options.events)
