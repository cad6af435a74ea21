"""Models for the command line, with example inputs; see `graphshard plan --help`.

    graphshard plan factories:small --policy block:Block --world-size 4

Both are built on the meta device, so the large one takes no more memory than the small one.
"""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig
from torch import Tensor


def small() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Two blocks, 128 wide: 0.4 M parameters."""
    return _with_inputs(GPTConfig(layers=2), length=128)


def large() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Eighty blocks, 8192 wide: 65 G parameters."""
    config = GPTConfig(vocab=32_000, layers=80, heads=64, width=8192, tied=False)
    return _with_inputs(config, length=2048)


def _with_inputs(config: GPTConfig, length: int) -> tuple[GPT, tuple[Tensor, Tensor]]:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return GPT(config), (tokens, tokens)
