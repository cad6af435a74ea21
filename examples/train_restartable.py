"""Train a GPT so that a run which is killed goes on by itself, and ends as if it had not been.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a new store for each start of the ranks
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_restartable.py runs/gpt

Kill any of its processes with `kill -9`: torchrun starts the ranks again, and they go on from the
last checkpoint in the folder, to the same bits. So does the same command after the machine was
switched off. It may then have another --nproc-per-node, as long as the ranks divide the batch: who
gets which sample follows from the sample's number, not from the number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
from functools import cache
from pathlib import Path

import stdlib_bytes
import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from torch import Tensor

import graphshard


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for the checkpoints, seen by all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, of all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=4e-3)
    return parser.parse_args()


class Samples:
    """The standard library's source in pieces, in another order each epoch.

    Sample `i` of the run is the same whatever the number of ranks, and whenever it is asked for.
    """

    def __init__(self, context: int) -> None:
        data, _ = stdlib_bytes.load()
        self.pieces = data[: len(data) // (context + 1) * (context + 1)].view(-1, context + 1)
        self.order = cache(self._order)

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(epoch)
        return torch.randperm(len(self.pieces), generator=generator)

    def __getitem__(self, numbers: range) -> tuple[Tensor, Tensor]:
        places = (divmod(number, len(self.pieces)) for number in numbers)
        rows = [self.pieces[self.order(epoch)[place]] for epoch, place in places]
        batch = torch.stack(rows).long()
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} cannot be split over {world} ranks")
    samples = Samples(args.context)
    torch.manual_seed(rank)  # for dropout; a checkpoint restores what became of it
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=args.layers, width=args.width, dropout=args.dropout))
    sharded = graphshard.compile(model, graphshard.BlockPolicy({Block}))
    optimizer = sharded.optimizer(torch.optim.AdamW, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler("cpu", growth_interval=50)
    run = {"step": 0, "sample": 0}

    last = graphshard.latest_checkpoint(args.folder)
    if last is None:
        sharded.init_weights(seed=0)
    else:
        sharded.load_checkpoint(last, optimizer, scheduler, scaler, extra=run)
    if rank == 0:
        print(f"{world} ranks begin at step {run['step']}", flush=True)

    while run["step"] < args.steps:
        end = run["sample"] + args.batch
        loss = sharded(*samples[range(run["sample"] + rank, end, world)])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        sharded.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        run["step"], run["sample"] = run["step"] + 1, end
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {run['step']}  loss {mean.item() / world:.6f}", flush=True)
        if run["step"] % args.every == 0 or run["step"] == args.steps:
            path = args.folder / f"step-{run['step']}"
            sharded.save_checkpoint(path, optimizer, scheduler, scaler, extra=run, keep=2)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # without torchrun: one rank
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # nothing may still refer to the group when the interpreter ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
