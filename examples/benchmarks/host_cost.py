"""The time of a step in Python: graphshard against `fully_shard` on a model whose ops are tiny.

    python examples/benchmarks/host_cost.py

Both train the same GPT, a few numbers wide, so that nearly all time is the host's: on a "fake"
process group of 8 ranks, whose collectives do nothing, on one rank, and on two ranks of Gloo, in a
process each. Times are CPU seconds of the thread that trains, in the first process; steps alternate
in order, and a ratio is the median over pairs with its 95 % interval. Threads of Gloo are left out:
the one that reads sockets spins while another holds a connection, so its time says how busy the
machine is. "plain" is the same model without sharding: what no runtime can save. Optimizer steps
are AdamW's, on the DTensors and on this rank's tensors (`sharded.optimizer`).

Ends with status 1 if forward and backward cost more than half of what they cost `fully_shard`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from paired import median_interval
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT, Block, GPTConfig

Work = Callable[[], object]

GROUPS = ("fake", "one", "gloo")
BAR = 0.5  # forward and backward, as a part of fully_shard's


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="pairs that are not timed")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 30])
    parser.add_argument("--world", type=int, default=8, help="ranks of the fake group")
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=GROUPS, help="these groups")
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward alone")
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
    """CPU time of this thread in `work`."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def compare(works: dict[str, Work], args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of each, one after the other, in an order that turns from round to round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(args.warmup + args.pairs):
        for name in names if turn % 2 == 0 else names[::-1]:
            times[name].append(cpu_seconds(works[name]))
        gc.collect()
    return {name: each[args.warmup :] for name, each in times.items()}


def report(title: str, times: dict[str, list[float]]) -> None:
    """A row for each, beside the first of them."""
    if dist.get_rank():
        return
    against = next(iter(times))
    print(f"\n{title:44}  {'median ms':>9}  ratio to {against}")
    for name, each in times.items():
        low, high = median_interval(ratios(each, times[against]))
        print(
            f"  {name:42}  {median(each) * 1e3:9.2f}  "
            f"{median(ratios(each, times[against])):.3f} ({low:.3f} to {high:.3f})"
        )
    sys.stdout.flush()


def ratios(mine: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


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


def measure(args: argparse.Namespace, layers: int, ranks: str) -> bool:
    """All comparisons on the present process group; whether the bar is kept."""
    plain = tiny(layers)
    policy = graphshard.BlockPolicy({Block})

    def ours() -> graphshard.ShardedModule:
        return graphshard.compile(copy.deepcopy(plain), policy, example_inputs=batch())

    def theirs() -> nn.Module:
        return sharded_by_torch(copy.deepcopy(plain))

    works = {
        "fully_shard": forward_backward(theirs()),
        "graphshard": forward_backward(ours()),
        "plain": forward_backward(copy.deepcopy(plain)),
    }
    times = compare(works, args)
    report(f"forward and backward, {layers} blocks, {ranks}", times)
    kept = median(ratios(times["graphshard"], times["fully_shard"])) <= BAR
    if not args.no_optimizer:
        measure_optimizers(args, f"{layers} blocks, {ranks}", plain, ours, theirs)
    return kept


def measure_optimizers(
    args: argparse.Namespace,
    where: str,
    plain: nn.Module,
    ours: Callable[[], graphshard.ShardedModule],
    theirs: Callable[[], nn.Module],
) -> None:
    for foreach in (True, False):
        how = "foreach" if foreach else "one by one"
        for name, work in (("step", stepped), ("whole step", trained)):
            model, own = theirs(), ours()
            works = {"fully_shard": work(model, adamw(model, foreach))}
            works["graphshard, DTensors"] = work(own, adamw(own, foreach))
            own = ours()
            optim = own.optimizer(torch.optim.AdamW, lr=1e-3, foreach=foreach)
            works["graphshard, sharded.optimizer"] = work(own, optim)
            model = copy.deepcopy(plain)
            works["plain"] = work(model, adamw(model, foreach))
            report(f"AdamW {how}, {name}, {where}", compare(works, args))


def on_gloo(rank: int, size: int, args: argparse.Namespace, folder: str) -> bool:
    """One of `size` ranks; whether the bar is kept."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = "one rank" if size == 1 else f"{size} ranks of Gloo"
    kept = [measure(args, layers, ranks) for layers in args.layers]
    gc.collect()  # nothing refers to the group any more
    dist.destroy_process_group()
    return all(kept)


def on_fake(args: argparse.Namespace) -> bool:
    """One of many ranks whose collectives do nothing; whether the bar is kept."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world)
    ranks = f"fake group of {args.world}"
    kept = [measure(args, layers, ranks) for layers in args.layers]
    dist.destroy_process_group()
    return all(kept)


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    kept = True
    if "fake" in args.only:
        kept &= on_fake(args)
    if "one" in args.only:
        with tempfile.TemporaryDirectory() as folder:
            kept &= on_gloo(0, 1, args, folder)
    if "gloo" in args.only:
        with tempfile.TemporaryDirectory() as folder:
            other = mp.get_context("spawn").Process(target=on_gloo, args=(1, 2, args, folder))
            other.start()
            kept &= on_gloo(0, 2, args, folder)
            other.join()
    print(f"\nat most {BAR} of fully_shard's forward and backward: {'yes' if kept else 'NO'}")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
