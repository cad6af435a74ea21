"""Train a RegNet, a convolutional network with BatchNorm, on scikit-learn's handwritten digits.

    torchrun --nproc-per-node 2 examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py --precision bf16

Every stage of the network is a unit. BatchNorm computes in float32 whatever the precision; its
running statistics are every rank's own, as in DDP.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import RegNetConfig, RegNetForImageClassification

import graphshard

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    return parser.parse_args()


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images `(n, 1, 8, 8)` in 0..1 and labels `(n,)`: to train on, and every sixth held out."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(labels)
    held_out = torch.arange(len(classes)) % 6 == 5
    return (pixels[~held_out], classes[~held_out]), (pixels[held_out], classes[held_out])


def regnet() -> RegNetForImageClassification:
    config = RegNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        groups_width=8,
        layer_type="y",
        num_labels=10,
    )
    return RegNetForImageClassification(config)


@torch.no_grad()
def accuracy(model: graphshard.ShardedModule, images: Tensor, labels: Tensor) -> float:
    """Share of the held-out images that are told right; each rank looks at its own part."""
    model.eval()
    own = slice(RANK, len(labels) // WORLD * WORLD, WORLD)
    right = model(images[own]).logits.argmax(-1) == labels[own]
    counts = torch.tensor([float(right.sum()), float(len(right))])
    if WORLD > 1:
        dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def run(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    (images, labels), held_out = digits()
    dtype = DTYPES[args.precision]
    policy = graphshard.BlockPolicy(
        {"RegNetStage"},
        strategy=args.strategy,
        mixed_precision=dtype and graphshard.MixedPrecision(param_dtype=dtype),
    )
    sharded = graphshard.compile(regnet().train(), policy)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=4e-3)
    if RANK == 0:
        print(sharded.plan, "\n")
    size = args.batch * WORLD
    for epoch in range(1, args.epochs + 1):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(order) - size + 1, size):
            own = order[start + RANK : start + size : WORLD]
            loss = sharded(images[own], labels[own]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = accuracy(sharded, *held_out)
        if RANK == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}  held-out accuracy {found:.3f}")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo")
    run(args)
    if WORLD > 1:
        gc.collect()  # nothing may still refer to the group when the interpreter ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
