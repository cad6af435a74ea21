"""The models of the benchmarks, each with a batch: larger ones to time, small ones to weigh.

`TIMED` is for `time_truth.py` and `rivals.py`: at scale 1 a step takes one CPU core 0.1 to 2
seconds; `scale` multiplies batches, for devices that are faster. `WEIGHED` is for
`memory_truth.py`, where `scale` is the number of samples; `RIVALS` is for `rivals.py`, which
compares losses. Weights are random and nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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


def tokens(batch: int, length: int, vocab: int = VOCAB) -> Draw:
    """Token ids, int64 (batch * scale, length), which are the labels as well."""

    def draw(scale: int, generator: torch.Generator | None) -> Batch:
        ids = torch.randint(vocab, (batch * scale, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

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
    return lambda: GPT(GPTConfig(VOCAB, layers, heads, width, dropout))


def transformer(kind: str, task: str, **sizes: Any) -> Build:
    """A model of transformers: `LlamaForCausalLM(LlamaConfig(**sizes))` for Llama, ForCausalLM."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        model: nn.Module = getattr(transformers, f"{kind}{task}")(config)
        return model

    return build


def llama(
    width: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> Build:
    return transformer(
        "Llama",
        "ForCausalLM",
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        use_cache=False,
        **more,
    )


def bert(width: int, hidden: int, layers: int, heads: int, **more: Any) -> Build:
    return transformer(
        "Bert",
        "ForMaskedLM",
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **more,
    )


def t5(width: int, head: int, hidden: int, layers: int, heads: int, **more: Any) -> Build:
    """A T5 of transformers, `layers` blocks in each half."""
    return transformer(
        "T5",
        "ForConditionalGeneration",
        d_model=width,
        d_kv=head,
        d_ff=hidden,
        num_layers=layers,
        num_heads=heads,
        decoder_start_token_id=0,
        use_cache=False,
        **more,
    )


def regnet(first: int, sizes: list[int], depths: list[int], groups: int, labels: int) -> Build:
    return transformer(
        "RegNet",
        "ForImageClassification",
        embedding_size=first,
        hidden_sizes=sizes,
        depths=depths,
        groups_width=groups,
        num_labels=labels,
    )


def mixtral(width: int, hidden: int, layers: int, experts: int, vocab: int, **more: Any) -> Build:
    """A Mixtral of transformers, each token by two experts."""
    return transformer(
        "Mixtral",
        "ForCausalLM",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        use_cache=False,
        **more,
    )


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


_small_llama = llama(64, 176, 3, 4, 2, SMALL_VOCAB)


def _lora() -> nn.Module:
    model = _small_llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


# -- models to time ----------------------------------------------------------------------------

_regnet = regnet(32, [64, 128, 256, 512], [1, 2, 4, 1], 32, 100)

TIMED = {
    model.name: model
    for model in (
        Model("gpt-small", gpt(4, 256, 4), ("Block",), gpt_tokens(4, 128)),
        Model("gpt", gpt(8, 512, 8), ("Block",), gpt_tokens(2, 256)),
        Model("llama", llama(320, 864, 6, 8, 2, VOCAB), ("LlamaDecoderLayer",), tokens(2, 256)),
        Model("bert", bert(384, 1536, 4, 6, vocab_size=VOCAB), ("BertLayer",), tokens(4, 128)),
        Model("t5", t5(256, 64, 1024, 4, 4, vocab_size=VOCAB), ("T5Block",), tokens(4, 128)),
        Model("regnet", _regnet, ("RegNetYLayer",), images(8, 96)),
        Model("moe", mixtral(256, 512, 4, 8, VOCAB), ("MixtralDecoderLayer",), tokens(4, 128)),
    )
}

# -- models to weigh ---------------------------------------------------------------------------

_small_gpt = GPTConfig(vocab=SMALL_VOCAB, layers=3, heads=4, width=64, dropout=0.1, tied=True)
_small_bert = bert(64, 192, 3, 4, vocab_size=SMALL_VOCAB, max_position_embeddings=64)
_small_mixtral = mixtral(64, 96, 2, 4, SMALL_VOCAB, experts_implementation="grouped_mm")
_small_text = tokens(1, 32, SMALL_VOCAB)

WEIGHED = {
    model.name: model
    for model in (
        Model("gpt", lambda: GPT(_small_gpt), ("Block",), gpt_tokens(1, 32, SMALL_VOCAB)),
        Model("llama", _small_llama, ("LlamaDecoderLayer",), _small_text),
        Model("bert", _small_bert, ("BertLayer",), _small_text),
        Model("t5", t5(64, 16, 160, 2, 4, vocab_size=SMALL_VOCAB), ("T5Block",), _small_text),
        Model(
            "regnet",
            regnet(16, [32, 64], [1, 2], 16, 5),
            ("RegNetXLayer", "RegNetYLayer"),
            images(1, 32, 5),
        ),
        Model("mixtral", _small_mixtral, ("MixtralDecoderLayer",), _small_text),
        Model("lora", _lora, ("LlamaDecoderLayer",), _small_text),
    )
}

# -- models of rivals, without dropout, since compilers draw other random numbers ------------------

LEARNING_RATE = 3e-4


def without_dropout(build: Build) -> Build:
    """The model that `build` makes, with the probability of every dropout set to 0."""

    def built() -> nn.Module:
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return built


RIVALS = (
    Model("gpt-512", gpt(8, 512, 8, dropout=0.0), ("Block",), gpt_tokens(1, 128)),
    Model("gpt-deep", gpt(24, 256, 4, dropout=0.0), ("Block",), gpt_tokens(1, 128)),
    Model("gpt-narrow", gpt(12, 64, 4, dropout=0.0), ("Block",), gpt_tokens(1, 128)),
    replace(TIMED["llama"], batch=tokens(1, 128)),
    replace(TIMED["bert"], build=without_dropout(TIMED["bert"].build), batch=tokens(1, 128)),
    replace(TIMED["regnet"], name="convnet", batch=images(4, 64)),
)
"""GPTs of 8 blocks 512 wide, 24 blocks 256 wide (many units: overhead) and 12 blocks 64 wide (units
that are all latency), Llama's shape with grouped queries, BERT, and a convolutional network with
BatchNorm (RegNet)."""


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).relu().square().mean()


def _rows(scale: int, generator: torch.Generator) -> Batch:
    return {"x": torch.randn(scale, 8, generator=generator)}


TOY = Model("toy", _Toy, ("Linear",), _rows)
"""The model that every system trains once before its time counts."""

TINY = Model("tiny", gpt(2, 32, 2, dropout=0.0), ("Block",), gpt_tokens(1, 16))
"""For tests of the script."""


@dataclass(frozen=True)
class Data:
    """Batches of a model: another on every rank and step, the same for every system."""

    model: Model
    ranks: int
    scale: int
    device: torch.device

    def batch(self, step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(step * self.ranks + rank)
        drawn = self.model.batch(self.scale, generator)
        return {name: value.to(self.device).contiguous() for name, value in drawn.items()}


def made(model: Model, device: torch.device) -> nn.Module:
    """The model with the weights that every system starts from."""
    torch.manual_seed(0)
    return model.build().train().to(device)


def expected_losses(data: Data, steps: int, rank: int) -> list[float]:
    """The losses of `rank` over AdamW steps of a single process that has every rank's batch.

    Each rank's batch goes through the model by itself (BatchNorm sees no other), and gradients are
    averaged.
    """
    model = made(data.model, data.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        for other in range(data.ranks):
            loss = loss_of(model(**data.batch(step, other)))
            (loss / data.ranks).backward()
            if other == rank:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
