"""The cost of `check_finite` in a step of the GPT example, in paired runs.

    torchrun --nproc-per-node 2 examples/benchmarks/check_finite_cost.py --pairs 30

The same weights, batches, units and optimizer, once with checks and once without, take turns in one
process group, in alternating order. The time is that of the slowest rank. It prints the median of
the ratios, less 1, and the interval in which the median lies with 95 %; and the same in CPU time
of the thread that trains, which work beside it disturbs less (Gloo's threads are left out).
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from benchmark_models import gpt_tokens
from paired import median_interval

import graphshard
from examples.gpt import GPT, Block, GPTConfig


class Trained:
    """A sharded GPT with an optimizer, and what its steps took."""

    def __init__(self, config: GPTConfig, check_finite: str | None) -> None:
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy({Block}, check_finite=check_finite)
        self.module = graphshard.compile(GPT(config), policy)
        self.optimizer = self.module.optimizer(torch.optim.AdamW, lr=1e-4)

    def step(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Take a step: seconds of the slowest rank, and CPU seconds of this one."""
        dist.barrier()
        cpu, start = time.thread_time(), time.perf_counter()
        self.module(idx, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        elapsed = torch.tensor(time.perf_counter() - start)
        cpu = time.thread_time() - cpu
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return elapsed.item(), cpu


def main() -> None:
    """Parse the arguments, measure, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = GPTConfig(layers=options.layers, width=options.width)
    with_checks, without = Trained(config, "error"), Trained(config, None)
    draw = gpt_tokens(options.batch, options.length, config.vocab)
    generator = torch.Generator().manual_seed(dist.get_rank())
    wall, cpu, plain = [], [], []
    for number in range(options.pairs + 2):
        batch = draw(1, generator)
        pair = (with_checks, without) if number % 2 else (without, with_checks)
        taken = {each: each.step(batch["idx"], batch["targets"]) for each in pair}
        if number >= 2:
            wall.append(taken[with_checks][0] / taken[without][0] - 1)
            cpu.append(taken[with_checks][1] / taken[without][1] - 1)
            plain.append(taken[without][0])
    if dist.get_rank() == 0:
        print(f"{options.pairs} pairs, {1e3 * median(plain):.0f} ms a step without checks")
        for name, values in (("wall time", wall), ("CPU time", cpu)):
            low, high = median_interval(values)
            print(f"{name}: {median(values):+.2%} ({low:+.2%} to {high:+.2%})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
