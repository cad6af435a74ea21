"""Small models to train, with batches: real ones, and ones with habits that sharding has to handle.

Weights are random and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import GPT, GPTConfig

VOCAB = 67  # odd, so that no number of ranks divides the embedding's rows


@dataclass(frozen=True)
class Case:
    """A model, the class names of its units, and its keyword inputs."""

    name: str
    build: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    batch: Callable[[], dict[str, Tensor]]

    def model(self) -> nn.Module:
        """The model in train mode, with the same weights at every call."""
        torch.manual_seed(1)
        return self.build().train()

    def inputs(self, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return self.batch()


def loss_of(output: object) -> Tensor:
    """The loss in what a model returned: the output itself, or its `loss`."""
    return output if isinstance(output, Tensor) else output.loss  # type: ignore[attr-defined]


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (2, 17))
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=VOCAB, layers=2, heads=2, width=24, dropout=0.1, tied=True))


def _gpt_batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (2, 18))
    return {"idx": ids[:, :-1], "targets": ids[:, 1:]}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=24, n_layer=2, n_head=2)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=32,
    )
    return BertForMaskedLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=12,
        d_ff=40,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4, num_labels=5
    )
    return RegNetForImageClassification(config)


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(5, (4,))}


CASES = {
    case.name: case
    for case in (
        Case("gpt", _gpt, ("Block",), _gpt_batch),
        Case("llama", _llama, ("LlamaDecoderLayer",), _tokens),
        Case("gpt2", _gpt2, ("GPT2Block",), _tokens),
        Case("bert", _bert, ("BertLayer",), _tokens),
        Case("t5", _t5, ("T5Block",), _tokens),
        Case("regnet", _regnet, ("RegNetYLayer",), _images),
    )
}


# -- small modules, whose shapes no group of ranks divides -----------------------------------------

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
