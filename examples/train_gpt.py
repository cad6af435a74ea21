"""Train a byte-level GPT on the Python standard library's own source, sharded over ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --check --steps 20

Gloo on CPU, NCCL on CUDA; plain `python examples/train_gpt.py` is one rank. With --check rank 0
also trains the plain model in one process, on the batches of all ranks, and prints both losses
step by step; the exit code is 1 if they ever differ by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import time
from collections.abc import Iterator

import stdlib_bytes
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn

import graphshard
from graphshard.cli.policy import parse_policy

TOLERANCE = 1e-4  # nats; rounding alone, where ranks add gradients up in another order
HELD_OUT_BATCHES = 16
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--policy", default="block:Block", help="block:Class or size:N")
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--dump", metavar="DIR", help="write the rewritten program there")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--check", action="store_true", help="compare with a single process")
    return parser.parse_args()


def start(kind: str | None) -> torch.device:
    """Join the other ranks, if there are any; the device of this one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    kind = kind or ("cuda" if torch.cuda.is_available() and enough else "cpu")
    device = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if WORLD > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    if WORLD > 1:
        dist.all_reduce(value)
    return (value / WORLD).item()


def peak_memory(device: torch.device) -> str:
    """The most memory allocated on CUDA, or that of this process on a CPU, with torch itself."""
    if device.type == "cuda":
        return f"peak {torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"process {peak / 2**20:,.0f} MiB"


def say(*words: object) -> None:
    if RANK == 0:
        print(*words, flush=True)


def show_schedule(sharded: graphshard.ShardedModule) -> None:
    """The lines of the program's schedule dump that are about one unit of the plan."""
    unit = sharded.plan.units[len(sharded.plan.units) // 2].fqn or "(root)"
    say(f"Schedule of {unit}, from the rewritten program:")
    for line in str(sharded.program).splitlines():
        words = line.replace(",", " ").split()
        if line in ("forward:", "backward:") or unit in words or "live bytes" in line:
            say(line)


class Batches:
    """The batches of every rank and step, the same however many processes draw them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.train, self.held_out = stdlib_bytes.load()

    def draw(self, data: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
        seed = step * WORLD + rank
        torch.manual_seed(seed)  # dropout draws from it
        size, length = self.args.batch, self.args.context
        idx, targets = stdlib_bytes.batch(data, size=size, length=length, seed=seed)
        return idx.to(self.device), targets.to(self.device)


class Trainer:
    """A model, its AdamW and its learning rate: a short warm-up, then a line down to a tenth."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model
        self.optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optim, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / args.steps)
        )

    def step(self, batches: Iterator[tuple[Tensor, Tensor]], share: float = 1.0) -> Tensor:
        """One optimizer step on the given batches, each with `share` of the gradient; the loss."""
        total = torch.zeros(())
        for idx, targets in batches:
            loss = self.model(idx, targets) * share
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()
        return total


def train(
    args: argparse.Namespace,
    sharded: nn.Module,
    reference: nn.Module | None,
    batches: Batches,
) -> tuple[float, list[float]]:
    """Train; returns the last loss and, with --check on rank 0, each step's difference."""
    trainer = Trainer(sharded, args)
    plain = Trainer(reference, args) if reference is not None else None
    differences: list[float] = []
    loss, begin = float("nan"), time.perf_counter()
    if args.check:
        say("\n  step     sharded  one process  difference")
    for step in range(args.steps):
        loss = mean_over_ranks(trainer.step(iter([batches.draw(batches.train, step, RANK)])))
        if plain is not None:
            every = (batches.draw(batches.train, step, rank) for rank in range(WORLD))
            expected = plain.step(every, share=1 / WORLD).item()
            differences.append(loss - expected)
            say(f"{step:6d}  {loss:10.6f}   {expected:10.6f}  {loss - expected:10.1e}")
        if not args.check and (step + 1) % 20 == 0:
            speed = args.batch * args.context * WORLD * (step + 1) / (time.perf_counter() - begin)
            peak = peak_memory(batches.device)
            say(f"step {step + 1:4d}  loss {loss:.3f}  {speed:,.0f} tokens/s  {peak}")
    return loss, differences


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Batches) -> float:
    """Mean loss, in nats per byte, on files that were not trained on."""
    model.eval()
    losses = [
        mean_over_ranks(model(*batches.draw(batches.held_out, step, RANK)))
        for step in range(HELD_OUT_BATCHES)
    ]
    return sum(losses) / len(losses)


def run(args: argparse.Namespace, device: torch.device) -> bool:
    """The whole demo; whether the losses agreed (True without --check)."""
    batches = Batches(args, device)
    say(
        f"{len(batches.train):,} bytes of Python to train on, {len(batches.held_out):,} held out; "
        f"{WORLD} rank(s) on {device.type}"
    )

    config = GPTConfig(layers=args.layers, width=args.width, dropout=args.dropout)
    with torch.device("meta"):
        model = GPT(config)
    policy = parse_policy(args.policy, strategy=args.strategy)
    example = batches.draw(batches.train, 0, RANK)
    sharded = graphshard.compile(model, policy, example_inputs=example, device=device)
    sharded.init_weights(seed=0)
    say(f"\n{sharded.plan}\n")
    show_schedule(sharded)
    if args.dump and RANK == 0:
        sharded.dump(args.dump)
        say(f"the rewritten program is in {args.dump}")

    reference = None
    if args.check:
        full = sharded.full_state_dict()  # {} on ranks other than 0
        if RANK == 0:
            reference = GPT(config).to(device)
            reference.load_state_dict(full)
    loss, differences = train(args, sharded, reference, batches)
    held_out = held_out_loss(sharded, batches)
    say(f"\ntraining loss {loss:.3f}, held-out loss {held_out:.3f} nats per byte")
    same = all(abs(difference) <= TOLERANCE for difference in differences)  # a NaN is not
    if args.check:
        verdict = "the same" if same else "NOT the same"
        say(f"the losses are {verdict} within {TOLERANCE:.0e} nats")
    return same


def main() -> int:
    args = parse_args()
    device = start(args.device)
    same = run(args, device)
    if WORLD > 1:
        # Whatever still refers to the group keeps its threads alive, and Gloo's abort the process
        # if they let go of their last work while the interpreter ends.
        gc.collect()
        dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
