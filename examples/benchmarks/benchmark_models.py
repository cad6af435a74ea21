"""The models of the benchmarks, each with a batch: larger ones to time, small ones to weigh.

`TIMED` is for `time_truth.py` and `rivals.py`: at scale 1 a step takes one CPU core 0.1 to 2
seconds; `scale` multiplies batches, for devices that are faster. `WEIGHED` is for
`memory_truth.py`, where `scale` is the number of samples. Weights are random and nothing is
downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.gpt import GPT, GPTConfig

VOCAB = 2048
SMALL_VOCAB = 131  # which no number of ranks divides
Build = Callable[[], nn.Module]
Batch = dict[str, Any]
Draw = Callable[[int, torch.Generator | None], Batch]


@dataclass(frozen=True)
class Model:
    """A builder, the class names of its units, and keyword inputs of some scale.

    A batch is drawn from a generator; None: torch's own.
    """

    name: str
    build: Build
    blocks: tuple[str, ...]
    batch: Draw


def loss_of(output: Any) -> Tensor:
    """The loss that a model returned: the output itself, or its `loss`."""
    return output if isinstance(output, Tensor) else output.loss


# -- batches -----------------------------------------------------------------------------------


def tokens(batch: int, length: int, vocab: int = VOCAB, **more: Any) -> Draw:
    """Token ids, int64 (batch * scale, length), which are the labels as well."""

    def draw(scale: int, generator: torch.Generator | None) -> Batch:
        ids = torch.randint(vocab, (batch * scale, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone(), **more}

    return draw


def gpt_tokens(batch: int, length: int, vocab: int = VOCAB) -> Draw:
    """Token ids and the ids that follow them, each int64 (batch * scale, length)."""

    def draw(scale: int, generator: torch.Generator | None) -> Batch:
        ids = torch.randint(vocab, (batch * scale, length + 1), generator=generator)
        return {"idx": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()}

    return draw


def images(batch: int, size: int, labels: int = 100) -> Draw:
    """Pixels, float32 (batch * scale, 3, size, size), and a label for each image."""

    def draw(scale: int, generator: torch.Generator | None) -> Batch:
        pixels = torch.randn(batch * scale, 3, size, size, generator=generator)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(labels, (batch * scale,), generator=generator),
        }

    return draw


# -- builders ----------------------------------------------------------------------------------


def gpt(layers: int, width: int, heads: int, dropout: float = 0.1) -> Build:
    """A GPT of examples/gpt.py."""
    return lambda: GPT(GPTConfig(VOCAB, layers, heads, width, dropout))


def _small_gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=SMALL_VOCAB, layers=3, heads=4, width=64, dropout=0.1, tied=True))


def transformer(kind: str, task: str, **sizes: Any) -> Build:
    """A model of transformers: `LlamaForCausalLM(LlamaConfig(**sizes))` for Llama, ForCausalLM."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        model: nn.Module = getattr(transformers, f"{kind}{task}")(config)
        return model

    return build


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


_small_llama = transformer(
    "Llama",
    "ForCausalLM",
    vocab_size=SMALL_VOCAB,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def _lora() -> nn.Module:
    model = _small_llama().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


# -- models to time ----------------------------------------------------------------------------

_llama = transformer(
    "Llama",
    "ForCausalLM",
    vocab_size=VOCAB,
    hidden_size=320,
    intermediate_size=864,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    use_cache=False,
)
_bert = transformer(
    "Bert",
    "ForMaskedLM",
    vocab_size=VOCAB,
    hidden_size=384,
    num_hidden_layers=4,
    num_attention_heads=6,
    intermediate_size=1536,
)
_t5 = transformer(
    "T5",
    "ForConditionalGeneration",
    vocab_size=VOCAB,
    d_model=256,
    d_kv=64,
    d_ff=1024,
    num_layers=4,
    num_heads=4,
    decoder_start_token_id=0,
    use_cache=False,
)
_regnet = transformer(
    "RegNet",
    "ForImageClassification",
    embedding_size=32,
    hidden_sizes=[64, 128, 256, 512],
    depths=[1, 2, 4, 1],
    groups_width=32,
    num_labels=100,
)
_mixtral = transformer(
    "Mixtral",
    "ForCausalLM",
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

TIMED = (
    Model("gpt-small", gpt(4, 256, 4), ("Block",), gpt_tokens(4, 128)),
    Model("gpt", gpt(8, 512, 8), ("Block",), gpt_tokens(2, 256)),
    Model("llama", _llama, ("LlamaDecoderLayer",), tokens(2, 256)),
    Model("bert", _bert, ("BertLayer",), tokens(4, 128)),
    Model("t5", _t5, ("T5Block",), tokens(4, 128)),
    Model("regnet", _regnet, ("RegNetYLayer",), images(8, 96)),
    Model("moe", _mixtral, ("MixtralDecoderLayer",), tokens(4, 128)),
)

# -- models to weigh ---------------------------------------------------------------------------

_small_bert = transformer(
    "Bert",
    "ForMaskedLM",
    vocab_size=SMALL_VOCAB,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=192,
    max_position_embeddings=64,
)
_small_t5 = transformer(
    "T5",
    "ForConditionalGeneration",
    vocab_size=SMALL_VOCAB,
    d_model=64,
    d_kv=16,
    d_ff=160,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
_small_regnet = transformer(
    "RegNet",
    "ForImageClassification",
    embedding_size=16,
    hidden_sizes=[32, 64],
    depths=[1, 2],
    groups_width=16,
    num_labels=5,
)
_small_mixtral = transformer(
    "Mixtral",
    "ForCausalLM",
    vocab_size=SMALL_VOCAB,
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
_small_text = tokens(1, 32, SMALL_VOCAB)
_without_cache = tokens(1, 32, SMALL_VOCAB, use_cache=False)

WEIGHED = {
    model.name: model
    for model in (
        Model("gpt", _small_gpt, ("Block",), gpt_tokens(1, 32, SMALL_VOCAB)),
        Model("llama", _small_llama, ("LlamaDecoderLayer",), _without_cache),
        Model("bert", _small_bert, ("BertLayer",), _small_text),
        Model("t5", _small_t5, ("T5Block",), _without_cache),
        Model("regnet", _small_regnet, ("RegNetXLayer", "RegNetYLayer"), images(1, 32, 5)),
        Model("mixtral", _small_mixtral, ("MixtralDecoderLayer",), _without_cache),
        Model("lora", _lora, ("LlamaDecoderLayer",), _without_cache),
    )
}
