"""The model and the data of the three scripts beside it, and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MICRO, BATCH, LENGTH, VOCAB, WIDTH = 2, 8, 16, 64, 32


class Block(nn.Module):
    """A causal mean of what came before, and an MLP, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, T, WIDTH)` to the same."""
        count = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        x = x + self.mix(self.norm1(x)).cumsum(1) / count
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Token indices and targets `(B, T)` to the mean loss in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, without dimensions."""
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int, micro: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share of a batch: the next token is its number doubled, most of the time."""
    draw = torch.Generator().manual_seed(1000 * step + micro)
    idx = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    noise = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    targets = torch.where(noise < VOCAB // 8, noise, 2 * idx % VOCAB)
    return idx[rank::ranks], targets[rank::ranks]


def arguments() -> argparse.Namespace:
    """`--steps` to train in all, and `--folder` to resume from and save to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("migrate-out"))
    return parser.parse_args()
