"""Drawing dropout's masks again against saving them, in paired steps of minGPT's blocks.

    python examples/benchmarks/redraw_cost.py --pairs 30

Both recompute every block. One draws again from saved states of the generator; the other, which
asks for a CUDA graph, keeps the masks, since no graph can set such a state (on the CPU it runs
without a graph). They take turns, in alternating order, from the same random numbers, and must give
the same loss and gradients. It prints bytes held after forward, and the ratio of CPU time a step.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from literature import Block
from paired import median_interval
from torch import Tensor, nn

import graphshard
from examples.benchmarks.live_bytes import LiveBytes


class Blocks(nn.Module):
    """Blocks of minGPT, whose attention is in full matrices, without embedding and head."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        sizes = options.width, options.heads, options.length
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(options.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Trained:
    """Sharded blocks, and what their steps took."""

    def __init__(self, options: argparse.Namespace, keep: bool) -> None:
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy({"Block"}, recompute="units", cuda_graph=keep)
        self.module = graphshard.compile(Blocks(options), policy)

    def step(self, x: Tensor) -> tuple[float, Tensor]:
        """Take a step from one seed: its CPU seconds, and its loss."""
        self.module.zero_grad()
        torch.manual_seed(1)
        start = time.thread_time()
        loss = self.module(x)
        loss.backward()
        return time.thread_time() - start, loss.detach()

    def saved(self, x: Tensor) -> int:
        """Bytes that a forward leaves for its backward."""
        with LiveBytes() as live:
            live.add([*self.module.parameters(), *self.module.buffers(), x])
            before = live.current
            loss = self.module(x)
            held = live.current - before
            loss.backward()
        return held


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.batch, options.length, options.width)
    again, kept = Trained(options, keep=False), Trained(options, keep=True)
    ratios, seconds = [], []
    for number in range(options.pairs + 2):
        pair = (again, kept) if number % 2 else (kept, again)
        taken = {each: each.step(x) for each in pair}
        if not torch.equal(taken[again][1], taken[kept][1]) or not _same_grads(again, kept):
            raise SystemExit("they differ in loss or gradients")
        if number >= 2:
            ratios.append(taken[again][0] / taken[kept][0] - 1)
            seconds.append(taken[kept][0])
    low, high = median_interval(ratios)
    print(
        f"{options.pairs} pairs, {1e3 * median(seconds):.0f} ms of CPU time a step with masks kept"
    )
    print(f"drawn again: {median(ratios):+.2%} ({low:+.2%} to {high:+.2%})")
    held = [each.saved(x) / 2**20 for each in (kept, again)]
    print(f"held for backward: {held[0]:.1f} MiB with masks, {held[1]:.1f} MiB drawn again")


def _same_grads(one: Trained, other: Trained) -> bool:
    grads = ([p.grad for p in each.module.parameters()] for each in (one, other))
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*grads, strict=True)
    )


if __name__ == "__main__":
    main()
