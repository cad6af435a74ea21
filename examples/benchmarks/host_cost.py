"""What a step costs in Python: graphshard against `fully_shard` on a model whose ops are tiny.

    python examples/benchmarks/host_cost.py

Both train the same GPT, a few numbers wide, so that nearly all time is the host's: on a "fake"
process group of 8 ranks, whose collectives do nothing, and on one rank. Times are CPU seconds of
this process, of one thread; steps alternate in order, and a ratio is the median over pairs with its
95 % interval. "plain" is the same model without sharding: what no runtime can save. Optimizer steps
are AdamW's, on the DTensors and on this rank's tensors (`sharded.optimizer`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from paired import median_interval
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT, Block, GPTConfig

Work = Callable[[], object]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="pairs that are not timed")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--world", type=int, default=8, help="ranks of the fake group")
    parser.add_argument("--only", choices=["fake", "one"], help="one of the two groups")
    return parser.parse_args()


def tiny(layers: int) -> GPT:
    """A GPT of 10 parameters a block, a few numbers each."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=16, layers=layers, heads=2, width=16))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (1, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def sharded_by_torch(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def adamw(model: nn.Module, foreach: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)


def forward_backward(model: nn.Module) -> Work:
    """Forward and backward, gradients dropped."""
    inputs = batch()

    def work() -> None:
        model(*inputs).backward()
        model.zero_grad()

    return work


def cpu_seconds(work: Work) -> float:
    """CPU time of this process in `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(works: dict[str, Work], args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of each, one after the other, in an order that turns from round to round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(args.warmup + args.pairs):
        for name in names if turn % 2 == 0 else names[::-1]:
            times[name].append(cpu_seconds(works[name]))
        gc.collect()
    return {name: each[args.warmup :] for name, each in times.items()}


def report(title: str, times: dict[str, list[float]], against: str) -> None:
    print(f"\n{title:44}  {'median ms':>9}  ratio to {against}")
    for name, each in times.items():
        ratios = [mine / theirs for mine, theirs in zip(each, times[against], strict=True)]
        low, high = median_interval(ratios)
        print(
            f"  {name:42}  {median(each) * 1e3:9.2f}  {median(ratios):.3f} "
            f"({low:.3f} to {high:.3f})"
        )
    sys.stdout.flush()


def stepped(model: nn.Module, optim: torch.optim.Optimizer) -> Work:
    """The optimizer's step alone, on gradients that stay."""
    model(*batch()).backward()
    return optim.step


def trained(model: nn.Module, optim: torch.optim.Optimizer) -> Work:
    """A whole step of training."""
    inputs = batch()

    def work() -> None:
        model(*inputs).backward()
        optim.step()
        optim.zero_grad()

    return work


def measure(args: argparse.Namespace, ranks: str) -> None:
    plain = tiny(args.layers)
    policy = graphshard.BlockPolicy({Block})

    def ours() -> graphshard.ShardedModule:
        return graphshard.compile(copy.deepcopy(plain), policy, example_inputs=batch())

    def theirs() -> nn.Module:
        return sharded_by_torch(copy.deepcopy(plain))

    count = len(list(plain.parameters()))
    report(
        f"forward and backward, {ranks}",
        compare(
            {
                "fully_shard": forward_backward(theirs()),
                "graphshard": forward_backward(ours()),
                "plain": forward_backward(copy.deepcopy(plain)),
            },
            args,
        ),
        "fully_shard",
    )
    for foreach in (True, False):
        how = "foreach" if foreach else "one by one"
        works: dict[str, Work] = {}
        for name, work in (("step", stepped), ("forward, backward and step", trained)):
            model, own = theirs(), ours()
            works = {"fully_shard": work(model, adamw(model, foreach))}
            works["graphshard, DTensors"] = work(own, adamw(own, foreach))
            own = ours()
            optim = own.optimizer(torch.optim.AdamW, lr=1e-3, foreach=foreach)
            works["graphshard, sharded.optimizer"] = work(own, optim)
            model = copy.deepcopy(plain)
            works["plain"] = work(model, adamw(model, foreach))
            title = f"AdamW {how}, {count} parameters, {name}, {ranks}"
            report(title, compare(works, args), "fully_shard")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if args.only != "one":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world)
        measure(args, f"fake group of {args.world}")
        dist.destroy_process_group()
    if args.only != "fake":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        measure(args, "one rank")
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
