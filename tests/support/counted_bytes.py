"""A model whose bytes can be counted by hand, and a counter of those that live."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import graphshard
from examples.benchmarks.live_bytes import LiveBytes

WIDTH = 256
LAYER = WIDTH * WIDTH * 4  # bytes of a layer's weight
BATCH = 64
ACTIVATION = BATCH * WIDTH * 4


class Stack(nn.Module):
    """Layers as large as each other, without biases: bytes can be counted on fingers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def stack(**policy: object) -> tuple[graphshard.ShardedModule, Tensor]:
    torch.manual_seed(0)
    sharded = graphshard.compile(Stack(), graphshard.BlockPolicy({nn.Linear}, **policy))
    x = torch.randn(BATCH, WIDTH)
    sharded(x).backward()  # captures, agrees and allocates what stays
    sharded.zero_grad()
    return sharded, x


def counted(sharded: graphshard.ShardedModule, x: Tensor) -> tuple[LiveBytes, int]:
    """A counter, and the bytes of what lives anyway: shards and input."""
    live = LiveBytes()
    live.add([*sharded.parameters(), x])
    return live, live.current


def settles(live: LiveBytes, expected: int) -> None:
    """What no `free` gave back goes when Gloo's threads let go of their views of it."""
    for _ in range(500):
        if live.current == expected:
            return
        time.sleep(0.01)
    assert live.current == expected
