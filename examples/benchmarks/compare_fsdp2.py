"""graphshard against torch's `fully_shard`: paired, alternating steps in one process group.

    torchrun --nproc-per-node 2 examples/benchmarks/compare_fsdp2.py

Both train the same GPT from the same weights on the same batches with the same AdamW, each block a
unit. Steps come in pairs whose order alternates (A B, B A, ...), so that drift of the machine falls
on both alike; a step's time is the slowest rank's. The ratio is the median over pairs, with the
distribution-free confidence interval that the sign test gives for a median.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from paired import median_interval
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.cli.policy import parse_policy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT, Block, GPTConfig


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3, help="pairs that are not timed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="eager", help="graphshard's")
    parser.add_argument("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD")
    parser.add_argument("--backward-prefetch", choices=["pre", "post", "none"], default="pre")
    parser.add_argument("--forward-prefetch", type=int, default=0)
    return parser.parse_args()


PEAK_STEPS = 5


@dataclass
class Contestant:
    """A sharded model with its optimizer."""

    name: str
    model: nn.Module
    optim: torch.optim.Optimizer

    def step(self, idx: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(idx, targets)
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return loss.detach()

    def state(self) -> list[object]:
        """Every tensor that outlives a step."""
        return [*self.model.parameters(), *self.model.buffers(), *self.optim.state.values()]


def contestants(args: argparse.Namespace, device: torch.device) -> tuple[Contestant, Contestant]:
    """graphshard's and torch's sharded model, from the same weights."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig(layers=args.layers, width=args.width, heads=args.heads)).to(device)
    theirs = copy.deepcopy(plain)
    keep = args.strategy == "SHARD_GRAD_OP"
    for module in theirs.modules():
        if isinstance(module, Block):
            fully_shard(module, reshard_after_forward=not keep)
    fully_shard(theirs)
    prefetch = None if args.backward_prefetch == "none" else args.backward_prefetch
    policy = parse_policy(
        "block:Block",
        strategy=args.strategy,
        backward_prefetch=prefetch,
        forward_prefetch=args.forward_prefetch,
    )
    example = draw(args, device, 0)
    ours = graphshard.compile(
        plain, policy, example_inputs=example, device=device, backend=args.backend
    )
    return (
        Contestant("graphshard", ours, torch.optim.AdamW(ours.parameters(), lr=3e-4)),
        Contestant("fully_shard", theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-4)),
    )


def draw(args: argparse.Namespace, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    """A random batch, another on every rank and step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(256, (args.batch, args.context + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def seconds(work: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Seconds of `work` from a common start until this rank's device is done."""
    dist.barrier()
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def peak_bytes(who: Contestant, batch: tuple[Tensor, Tensor], device: torch.device) -> float:
    """The most bytes alive at once in a step: parameters, optimizer state and all it makes.

    The median over a few steps, since Gloo's threads drop their last tensors when they get to it.
    """
    peaks = []
    live = LiveBytes(device.type)
    live.add(who.state())
    for _ in range(PEAK_STEPS + 1):
        if device.type == "cpu":
            live.peak = live.current
            with live:
                who.step(*batch)
            peaks.append(live.peak)
        else:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            who.step(*batch)
            peaks.append(live.current + torch.cuda.max_memory_allocated() - before)
    return median(peaks[1:])  # what is kept from step to step is known after the first


def worst_rank(values: list[float], device: torch.device) -> list[float]:
    """Each value's maximum over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def run(args: argparse.Namespace, device: torch.device) -> None:
    pair = contestants(args, device)
    times: dict[str, list[float]] = {who.name: [] for who in pair}
    losses: dict[str, list[float]] = {who.name: [] for who in pair}
    for step in range(args.warmup + args.pairs):
        batch = draw(args, device, step)
        for who in pair if step % 2 == 0 else pair[::-1]:
            gc.collect()  # not in the middle of somebody's step
            elapsed, loss = seconds(lambda who=who, batch=batch: who.step(*batch), device)
            times[who.name].append(elapsed)
            losses[who.name].append(loss.item())
    ours, theirs = (worst_rank(times[who.name][args.warmup :], device) for who in pair)
    gaps = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    (gap,) = worst_rank([max(gaps)], device)
    batch = draw(args, device, args.warmup + args.pairs)
    peaks = worst_rank([peak_bytes(who, batch, device) for who in pair], device)
    if dist.get_rank() == 0:
        report(args, pair, ours, theirs, peaks, gap)


def report(
    args: argparse.Namespace,
    pair: tuple[Contestant, Contestant],
    ours: list[float],
    theirs: list[float],
    peaks: list[float],
    gap: float,
) -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    print(
        f"{args.layers}-layer, {args.width}-wide GPT, {args.strategy}, {args.pairs} pairs; "
        f"{dist.get_world_size()} ranks of {args.threads} thread(s), "
        f"{args.batch} x {args.context} tokens each\n"
    )
    print(f"{'':12}  {'median step':>11}  {'peak live bytes per rank':>24}")
    for who, took, peak in zip(pair, (ours, theirs), peaks, strict=True):
        print(f"{who.name:12}  {median(took) * 1e3:8.1f} ms  {int(peak):24,}")
    print(f"{'ratio':12}  {median(ratios):11.3f}  {peaks[0] / peaks[1]:24.3f}")
    print(f"\n95 % interval of the time ratio: {low:.3f} to {high:.3f}")
    same = "bit-equal on every step" if gap == 0 else f"up to {gap:.1e} apart"
    print(f"losses: {same}")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    run(args, device)
    gc.collect()  # nothing refers to the group any more: its threads end before the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
