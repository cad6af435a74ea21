"""Models for the command line; see `graphshard plan --help`.

graphshard plan factories:large --policy block:Block --world-size 256
graphshard dump factories:small --policy block:Block --world-size 4 --out out
"""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig
from torch import Tensor


def small() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Two blocks, 128 wide, and example inputs, so that its step can be captured."""
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    return GPT(GPTConfig(layers=2)), (tokens, tokens)


def network_step() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Eight blocks, 512 wide, with example inputs of 4 x 128 tokens."""
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    return GPT(GPTConfig(layers=8, heads=8, width=512)), (tokens, tokens)


def wide_step() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Four blocks, 4096 wide: 1.1 B parameters, with example inputs of 4096 tokens."""
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    return GPT(GPTConfig(vocab=32_000, layers=4, heads=32, width=4096, tied=False)), (
        tokens,
        tokens,
    )


def large() -> GPT:
    """Eighty blocks, 8192 wide: 65 B parameters, on the meta device."""
    return GPT(GPTConfig(vocab=32_000, layers=80, heads=64, width=8192, tied=False))


def large_step() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """`large` with example inputs of 4096 tokens."""
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    return large(), (tokens, tokens)


def trillion_step() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """128 blocks, 25,600 wide: 1 T parameters, with example inputs of 2048 tokens."""
    tokens = torch.zeros(1, 2048, dtype=torch.int64)
    config = GPTConfig(vocab=50_000, layers=128, heads=160, width=25_600)
    return GPT(config), (tokens, tokens)
