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


def of_transformers(name: str, task: str, **config: Any) -> Any:
    """A model of transformers, such as `name` "Llama" for `task` "ForCausalLM"."""
    import transformers

    made = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}{task}")(made)


LAYERS = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
"""A configuration of a small model, by the names that most models have."""


def llama(**config: Any) -> Any:
    """A small Llama, with other values in its configuration."""
    small = LAYERS | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return of_transformers("Llama", "ForCausalLM", **small | config)


def gpt2(**config: Any) -> Any:
    """A small GPT-2, with other values in its configuration."""
    small = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 2}
    return of_transformers("GPT2", "LMHeadModel", **small | config)


def _bert() -> nn.Module:
    return of_transformers("Bert", "ForMaskedLM", **LAYERS)


def _t5() -> nn.Module:
    sizes = {"d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2}
    config = {"vocab_size": VOCAB, "decoder_start_token_id": 0, **sizes}
    return of_transformers("T5", "ForConditionalGeneration", **config)


def _regnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4}
    return of_transformers("RegNet", "ForImageClassification", **sizes, num_labels=5)


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(5, (4,))}


CASES = {
    case.name: case
    for case in (
        Case("gpt", _gpt, ("Block",), _gpt_batch),
        Case("llama", llama, ("LlamaDecoderLayer",), _tokens),
        Case("gpt2", gpt2, ("GPT2Block",), _tokens),
        Case(
            "bert",
            lambda: of_transformers("Bert", "ForMaskedLM", **LAYERS),
            ("BertLayer",),
            _tokens,
        ),
        Case("t5", _t5, ("T5Block",), _tokens),
        Case("regnet", _regnet, ("RegNetYLayer",), _images),
    )
}


# -- language models that generate, and prompts for them -------------------------------------------

GENERATING: dict[str, Any] = {
    "vocab_size": 96,
    "initializer_range": 0.5,  # so that tokens differ
    "eos_token_id": 7,
}


def generating_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return llama(**GENERATING, **sizes, max_position_embeddings=64, pad_token_id=0).eval()


def generating_gpt2() -> Any:
    torch.manual_seed(0)
    return gpt2(
        **GENERATING, n_positions=64, n_embd=32, n_head=4, bos_token_id=1, pad_token_id=0
    ).eval()


def prompts(rank: int, rows: int = 2) -> Tensor:
    """Longer ones on higher ranks."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(8, 96, (rows, 4 + 3 * rank), generator=generator)


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


class TwoOutputs(nn.Module):
    """Two layers, each an output of its own, so that backward depends on which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class Heads(nn.Module):
    """A trunk and two heads, of which each call uses one."""

    def __init__(self, second: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, second)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x))


def tokens_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of this rank and step: (tokens, targets), int64 (4, 7)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    both = torch.randint(0, VOCABULARY, (2, 4, 7), generator=generator)
    return both[0], both[1]


def features_of(rank: int, step: int, width: int) -> tuple[Tensor]:
    """A batch of this rank and step: float32 (6, width)."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(6, width, generator=generator),)
