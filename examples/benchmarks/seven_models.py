"""Seven models of different make, each with a batch: what `time_truth.py` times.

Their weights are random and nothing is downloaded. At scale 1 a step takes one CPU core 0.1 to 2
seconds; `scale` multiplies batches, for devices that are faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT, GPTConfig

VOCAB = 2048
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """How to make one, the classes of its units, and a batch of it on a rank."""

    name: str
    build: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    batch: Callable[[int, torch.Generator], Batch]


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned."""
    return output if isinstance(output, Tensor) else output.loss


def tokens(batch: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(scale: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(VOCAB, (batch * scale, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def gpt(layers: int, width: int, heads: int, dropout: float = 0.1) -> Callable[[], nn.Module]:
    return lambda: GPT(GPTConfig(VOCAB, layers, heads, width, dropout))


def gpt_tokens(batch: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(scale: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(VOCAB, (batch * scale, length + 1), generator=generator)
        return {"idx": ids[:, :-1], "targets": ids[:, 1:]}

    return draw


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=320,
            intermediate_size=864,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=1536,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=256,
            d_kv=64,
            d_ff=1024,
            num_layers=4,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    return RegNetForImageClassification(
        RegNetConfig(
            embedding_size=32,
            hidden_sizes=[64, 128, 256, 512],
            depths=[1, 2, 4, 1],
            groups_width=32,
            num_labels=100,
        )
    )


def images(batch: int, size: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(scale: int, generator: torch.Generator) -> Batch:
        pixels = torch.randn(batch * scale, 3, size, size, generator=generator)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(100, (batch * scale,), generator=generator),
        }

    return draw


def _moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


MODELS = (
    Model("gpt-small", gpt(4, 256, 4), ("Block",), gpt_tokens(4, 128)),
    Model("gpt", gpt(8, 512, 8), ("Block",), gpt_tokens(2, 256)),
    Model("llama", _llama, ("LlamaDecoderLayer",), tokens(2, 256)),
    Model("bert", _bert, ("BertLayer",), tokens(4, 128)),
    Model("t5", _t5, ("T5Block",), tokens(4, 128)),
    Model("regnet", _regnet, ("RegNetYLayer",), images(8, 96)),
    Model("moe", _moe, ("MixtralDecoderLayer",), tokens(4, 128)),
)
