"""Small real models with batches to train them on; random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
