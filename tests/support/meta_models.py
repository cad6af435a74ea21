"""Small and huge models, all on meta, for the tests of policies and plans."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden: int, kv: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)


class Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, kv: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, kv)
        self.mlp = MLP(hidden, ffn)
        self.input_layernorm = nn.RMSNorm(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)


class Decoder(nn.Module):
    def __init__(self, vocab: int, hidden: int, ffn: int, layers: int, kv: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, ffn, kv) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)


class Llama(nn.Module):
    """Llama's parameters and module names, without its forward."""

    def __init__(
        self, *, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int
    ) -> None:
        super().__init__()
        kv = hidden // heads * kv_heads
        self.model = Decoder(vocab, hidden, ffn, layers, kv)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)


def llama(**config: int) -> Llama:
    with torch.device("meta"):
        return Llama(**config)


LLAMA_7B = {
    "vocab": 32000,
    "hidden": 4096,
    "ffn": 11008,
    "layers": 32,
    "heads": 32,
    "kv_heads": 32,
}
LLAMA_70B = {
    "vocab": 32000,
    "hidden": 8192,
    "ffn": 28672,
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
}


class Weight(nn.Module):
    """A module with one parameter of `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.up, self.down, self.norm = map(Weight, (100, 400, 400, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Example(nn.Module):
    """emb 500, two blocks of 920 (attn 100, up 400, down 400, norm 20), head 500: 2,840 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = Weight(500)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Weight(500)


def tree_of(**children: nn.Module) -> nn.Module:
    """A module with these children."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module
