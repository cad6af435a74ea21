"""A compact Llama: rotary grouped-query attention, SwiGLU, RMSNorm, pre-norm blocks, untied head.

As in "The Llama 3 Herd of Models" (arXiv:2407.21783); `LlamaConfig()` has the sizes of the 8B
model. Every module with parameters of its own has a `reset_parameters`, so the model can be built
on the meta device and made real later, in shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from examples import gpt


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; `width` is split evenly over `heads`, of which several share keys."""

    vocab: int = 128_256
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 4096
    hidden: int = 14_336


class Linear(gpt.Linear):
    """A linear layer without bias whose weight starts normal with deviation 0.02."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, std=0.02, bias=False)


class Attention(nn.Module):
    """Causal self-attention, `(B, T, width)` to `(B, T, width)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.size = config.width // config.heads
        self.q = Linear(config.width, config.width)
        self.k = Linear(config.width, config.kv_heads * self.size)
        self.v = Linear(config.width, config.kv_heads * self.size)
        self.out = Linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = gpt.rotate(q, rotation), gpt.rotate(k, rotation)
        shared = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """SwiGLU, `(B, T, width)` to `(B, T, width)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.hidden)
        self.up = Linear(config.width, config.hidden)
        self.down = Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=1e-5)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Token indices `(B, T)` and targets `(B, T)` to the mean loss (nats)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = gpt.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = Linear(config.width, config.vocab)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        size = self.config.width // self.config.heads
        rotation = gpt.rotations(idx.shape[1], size, idx.device, base=500_000.0)
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
