"""The time of a step in Python: graphshard against `fully_shard` on a model whose ops are tiny.

    python examples/benchmarks/host_cost.py

Both train the same GPT, a few numbers wide, so that nearly all time is the host's: on a "fake"
process group of 8 ranks, whose collectives do nothing, on one rank, and on two ranks of Gloo, in a
process each. Times are CPU seconds of the thread that trains, in the first process; steps alternate
in order, and a ratio is the median over pairs with its 95 % interval. Threads of Gloo are left out:
the one that reads sockets spins while another holds a connection, so its time says how busy the
machine is. "plain" is the same model without sharding: what no runtime can save. Optimizer steps
are AdamW's.

Ends with status 1 if forward and backward cost more than half of what they cost `fully_shard`.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from examples.gpt import GPT, Block, GPTConfig

Work = Callable[[int], object]

GROUPS = {"fake": 8, "one": 1, "gloo": 2}
BAR = 0.5  # forward and backward, as a part of fully_shard's
BATCH = torch.randint(16, (2, 1, 4), generator=torch.Generator().manual_seed(0)).unbind()


def parse_args() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="pairs that are not timed")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 30])
    parser.add_argument("--only", choices=[*GROUPS], nargs="+", default=[*GROUPS])
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward alone")
    return parser.parse_args()


def sharded_by_torch(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def step_of(model: nn.Module, optim: torch.optim.Optimizer | None = None) -> Work:
    """Forward, backward, and a step of `optim` if there is one."""

    def work(index: int) -> None:
        model(*BATCH).backward()
        if optim is not None:
            optim.step()
        model.zero_grad()

    return work


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of this thread in `work`, and its result."""
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def compare(works: dict[str, Work], args: argparse.Namespace, title: str) -> float:
    """Print a row for each, beside the first of them; the second's ratio to the first."""
    times, _ = harness.alternate(works, args.warmup, args.pairs, cpu_seconds)
    against = next(iter(times))
    ratios = {name: harness.ratios(each, times[against]) for name, each in times.items()}
    if dist.get_rank() == 0:
        print(f"\n{title:44}  {'median ms':>9}  ratio to {against}")
        for name, each in times.items():
            low, high = harness.median_interval(ratios[name])
            print(
                f"  {name:42}  {median(each) * 1e3:9.2f}  "
                f"{median(ratios[name]):.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )
    return median([*ratios.values()][1])


def measure(args: argparse.Namespace, layers: int, ranks: str) -> float:
    """All comparisons on the present process group; the ratio of forward and backward."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig(vocab=16, layers=layers, heads=2, width=16))
    policy = graphshard.BlockPolicy({Block})

    def ours() -> graphshard.ShardedModule:
        return graphshard.compile(copy.deepcopy(plain), policy, example_inputs=BATCH)

    def theirs() -> nn.Module:
        return sharded_by_torch(copy.deepcopy(plain))

    models = {"fully_shard": theirs(), "graphshard": ours(), "plain": copy.deepcopy(plain)}
    works = {name: step_of(model) for name, model in models.items()}
    where = f"{layers} blocks, {ranks}"
    ratio = compare(works, args, f"forward and backward, {where}")
    if not args.no_optimizer:
        models = {"fully_shard": theirs(), "graphshard": ours(), "plain": plain}
        works = {
            name: step_of(model, torch.optim.AdamW(model.parameters()))
            for name, model in models.items()
        }
        compare(works, args, f"AdamW, whole step, {where}")
    return ratio


def on_group(rank: int, args: argparse.Namespace) -> list[float]:
    where = f"{dist.get_backend()} group of {dist.get_world_size()}"
    return [measure(args, layers, where) for layers in args.layers]


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    found = []
    for group in args.only:
        if group == "fake":
            harness.fake_ranks(GROUPS[group])
            found += on_group(0, args)
            dist.destroy_process_group()
        else:
            found += harness.on_ranks(on_group, GROUPS[group], args)
    kept = max(found) <= BAR
    print(f"\nat most {BAR} of fully_shard's forward and backward: {'yes' if kept else 'NO'}")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
