"""Is it true? Predicted step times of seven models against measured ones.

    python examples/benchmarks/time_truth.py
    python examples/benchmarks/two_hosts.py -- examples/benchmarks/time_truth.py --models gpt

It starts ranks of one thread each, one and then two of them (`--ranks`), or takes those of
torchrun, calibrates them, and then times each model's training step (forward, backward, AdamW)
under each of `--policies` on the same ranks. `--hardware FILE` takes a file of `graphshard
calibrate` instead of calibrating.

The prediction knows the calibrated figures and the program, and nothing of the measurement. A step
is timed from a common start to the end of the slowest rank; the median over steps is compared. A
rank alone on one thread is timed by its CPU time, as its operators are, since a virtual machine may
lose a tenth of the clock's time to others.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from examples.benchmarks.benchmark_models import TIMED, Model, loss_of
from graphshard.calibrate.run import calibrate
from graphshard.calibrate.steps import joined
from graphshard.hardware.hardware import Hardware
from graphshard.progress import Progress
from graphshard.runtime.group import Group
from graphshard.runtime.links import Effort

CPU = torch.device("cpu")

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "ahead": {"forward_prefetch": 1},
    "overlap": {"schedule": "overlap"},
    "grad_op": {"strategy": "SHARD_GRAD_OP"},
    "no_shard": {"strategy": "NO_SHARD"},
}
HEAD = (
    f"{'model':10}  {'policy':8}  ranks  {'predicted':>10}  {'measured':>10}  ratio  {'spread':>6}"
)


def parse_args() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--hardware", metavar="FILE", help="or preset, instead of calibrating")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", default=[1, 2])
    parser.add_argument("--steps", type=int, default=15, help="timed ones, at least")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=[*TIMED], default=[*TIMED])
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=["default"])
    return parser.parse_args()


def on_rank(rank: int, args: argparse.Namespace) -> None:
    """Print a line for each model and policy, and on rank 0 how far off they are."""
    with joined(CPU) as group:
        if rank == 0:
            print(HEAD, flush=True)
        if args.hardware is not None:
            hardware = Hardware.load(args.hardware)
        else:
            found = calibrate(group, dtypes=(), effort=Effort(), progress=Progress())
            hardware = found.hardware
        cases = [(TIMED[name], policy) for name in args.models for policy in args.policies]
        errors = [abs(compare(*case, args, group, hardware) - 1) for case in cases]
    if rank == 0:
        print(
            f"{group.size} rank(s): median absolute error {median(errors):.1%}, "
            f"worst {max(errors):.1%}"
        )


def compare(
    model: Model, named: str, args: argparse.Namespace, group: Group, hardware: Hardware
) -> float:
    torch.manual_seed(0)
    batch = model.batch(1, torch.Generator().manual_seed(group.rank))
    policy = graphshard.BlockPolicy(list(model.blocks), **POLICIES[named])
    sharded = graphshard.compile(model.build().train(), policy, example_kwargs=batch)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)
    estimate = graphshard.simulate(sharded, hardware=hardware)
    clock = time.thread_time if group.size == 1 else time.perf_counter

    def step() -> float:
        """Seconds of a step from a common start."""
        gc.collect()  # not in the middle of a step
        dist.barrier()
        begin = clock()
        loss_of(sharded(**batch)).backward()
        optimizer.step()
        took = clock() - begin
        optimizer.zero_grad()
        return took

    times = [step() for _ in range(args.warmup + args.steps)][args.warmup :]
    if any(group.all_gather_object(spread(times) > 0.1)):  # disturbed: as many again
        times += [step() for _ in range(args.steps)]
    slowest = [max(each) for each in zip(*group.all_gather_object(times), strict=True)]
    ratio = estimate.step_seconds / median(slowest)
    if group.rank == 0:
        print(
            f"{model.name:10}  {named:8}  {group.size:5}  {estimate.step_seconds * 1e3:7.1f} ms  "
            f"{median(slowest) * 1e3:7.1f} ms  {ratio:5.2f}  {spread(slowest):6.1%}",
            flush=True,
        )
    return ratio


def spread(times: list[float]) -> float:
    """Interquartile range, as a part of the median."""
    low, middle, high = quantiles(times, n=4)
    return (high - low) / middle


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        on_rank(int(os.environ["RANK"]), args)
        return
    for ranks in args.ranks:
        harness.on_ranks(on_rank, ranks, args)


if __name__ == "__main__":
    main()
