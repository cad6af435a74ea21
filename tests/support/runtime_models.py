"""Small models with the shapes and habits that sharding has to cope with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 19


class Block(nn.Module):
    """33 hidden rows: not divisible by any group."""

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 33)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(33, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class TiedGPT(nn.Module):
    """Embedding and head share their weight, in the root unit."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Odd(nn.Module):
    """A frozen block, an unused one, a parameter without dimensions, one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.frozen = Block()
        self.frozen.requires_grad_(False)
        self.unused = Block()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.row = nn.Parameter(torch.ones(1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(self.first(x)) * self.scale * self.row).pow(2).mean()


class Normed(nn.Module):
    """BatchNorm: buffers that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


class ManyOutputs(nn.Module):
    """Returns a dict: a loss, features that may go unused, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 10)
        self.left = nn.Linear(10, 3)
        self.right = nn.Linear(10, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        trunk = torch.tanh(self.trunk(x))
        left, right = self.left(trunk), self.right(trunk)
        return {
            "loss": left.pow(2).mean() * scale,
            "pair": (left, right),
            "best": right.argmax(-1),
            "trunk": trunk,
        }


def tokens_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of this rank and step: (tokens, targets), int64 (4, 7)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    both = torch.randint(0, VOCABULARY, (2, 4, 7), generator=generator)
    return both[0], both[1]


def features_of(rank: int, step: int, width: int) -> tuple[Tensor]:
    """A batch of this rank and step: float32 (6, width)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(6, width, generator=generator),)
