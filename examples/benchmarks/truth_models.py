"""Small models of seven kinds, with the batch of a training step: what memory is checked on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

VOCAB = 131  # which no number of ranks divides
BATCH = 4


@dataclass(frozen=True)
class Subject:
    """A model, the class names of its units, and its keyword inputs for a batch of given size."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    batch: Callable[[int], dict[str, Tensor]]


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank (LoRA, arXiv:2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, `(..., in)`, through both; `(..., out)`."""
        result: Tensor = self.frozen(x) + self.up(self.down(x))
        return result


def _llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**sizes | changes)


def _llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_llama_config())


def _lora() -> nn.Module:
    model = _llama().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=VOCAB, layers=3, heads=4, width=64, dropout=0.1, tied=True))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=192,
            max_position_embeddings=64,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=64,
            d_kv=16,
            d_ff=160,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def _regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    return RegNetForImageClassification(
        RegNetConfig(
            embedding_size=16, hidden_sizes=[32, 64], depths=[1, 2], groups_width=16, num_labels=5
        )
    )


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="grouped_mm",
        )
    )


def _tokens(count: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (count, 32))
    return {"input_ids": ids, "labels": ids.clone()}


def _uncached(count: int) -> dict[str, Any]:
    return {**_tokens(count), "use_cache": False}


def _text(count: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (count, 33))
    return {"idx": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()}


def _images(count: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(count, 3, 32, 32),
        "labels": torch.randint(5, (count,)),
    }


SUBJECTS = {
    "gpt": Subject(_gpt, ("Block",), _text),
    "llama": Subject(_llama, ("LlamaDecoderLayer",), _uncached),
    "bert": Subject(_bert, ("BertLayer",), _tokens),
    "t5": Subject(_t5, ("T5Block",), _uncached),
    "regnet": Subject(_regnet, ("RegNetXLayer", "RegNetYLayer"), _images),
    "mixtral": Subject(_mixtral, ("MixtralDecoderLayer",), _uncached),
    "lora": Subject(_lora, ("LlamaDecoderLayer",), _uncached),
}
