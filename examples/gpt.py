"""A compact GPT: rotary causal flash attention, pre-norm blocks, embedding and head tied or not.

Every module with parameters of its own has a `reset_parameters`, so the model can be built on the
meta device and made real later, in shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; `width` is split evenly over `heads`."""

    vocab: int = 256
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    tied: bool = True


class Linear(nn.Linear):
    """A linear layer whose weight starts normal with the given deviation and whose bias at zero."""

    def __init__(self, inputs: int, outputs: int, std: float, bias: bool = True) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding that starts normal with deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def rotations(length: int, size: int, device: torch.device, base: float = 10_000.0) -> Tensor:
    """Cosines and sines of rotary position embeddings (Su et al. 2021): `(2, length, size / 2)`."""
    frequency = base ** (torch.arange(0, size, 2, device=device) / -size)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the halves of the last dim of `x`, `(..., length, size)`, by their position's angle."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, `(B, T, width)` to `(B, T, width)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width, std=config.width**-0.5)
        self.proj = Linear(config.width, config.width, std=0.02 / config.layers**0.5)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = Linear(config.width, 4 * config.width, std=config.width**-0.5)
        self.down = Linear(4 * config.width, config.width, std=0.02 / config.layers**0.5)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x), rotation))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Token indices `(B, T)` to logits `(B, T, vocab)`, or to the mean loss (nats) of targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocab, std=0.02, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        rotation = rotations(idx.shape[1], self.config.width // self.config.heads, idx.device)
        x = self.drop(self.tokens(idx))
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
