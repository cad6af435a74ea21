"""transformers models from the meta device: initialised in shards, then the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import graphshard


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    )


def t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=99,
            d_model=32,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            d_kv=8,
            decoder_start_token_id=0,
        )
    )


@pytest.mark.parametrize("build", [llama, gpt2, t5], ids=lambda build: build.__name__)
def test_from_meta(build: Callable[[], Any]) -> None:
    with torch.device("meta"):
        model = build().train()
    sharded = graphshard.compile(model, graphshard.BlockPolicy(), check=True)
    sharded.init_weights(seed=1)
    real = build().train()
    for (name, mine), (_, theirs) in zip(
        sharded.named_parameters(), real.named_parameters(), strict=True
    ):
        spread = torch.stack([mine.std(), theirs.std()]) if mine.numel() > 1 else torch.zeros(2)
        torch.testing.assert_close(spread[0], spread[1], rtol=0.2, atol=1e-3, msg=name)
    real.load_state_dict(sharded.state_dict())
    for (name, mine), (_, theirs) in zip(
        sharded.named_buffers(), real.named_buffers(), strict=True
    ):
        assert torch.equal(mine, theirs), name  # rotary frequencies are in no state dict
    tokens = torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for module in (sharded, real):
        torch.manual_seed(0)
        out = module(input_ids=tokens, labels=tokens)
        out.loss.backward()
        losses.append(out.loss.detach())
    assert torch.equal(*losses)
    for (name, mine), (_, theirs) in zip(
        sharded.named_parameters(), real.named_parameters(), strict=True
    ):
        assert torch.equal(mine.grad, theirs.grad), name
