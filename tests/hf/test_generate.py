"""`generate` on ranks gives the plain model's tokens, whatever each rank asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import generating_gpt2 as gpt2
from models import generating_llama as llama
from models import prompts
from ranks import checks_of, error_of, on_ranks
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import graphshard
from graphshard.errors import CaptureError, FingerprintError

Make = Callable[[], PreTrainedModel]


def t5() -> PreTrainedModel:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=7,
    )
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.4)  # with its own small ones all tokens are equal
    return model


def same_tokens(make: Make, rank: int) -> None:
    model = make()
    sharded = graphshard.compile(make(), graphshard.BlockPolicy())
    ids = prompts(rank)
    for options in (
        {"max_new_tokens": 6 + 5 * rank},
        {"max_new_tokens": 9, "do_sample": True, "top_k": 20, "temperature": 1.3},
        {"max_new_tokens": 7, "num_beams": 3},
    ):
        torch.manual_seed(3 + rank)
        expected: Any = model.generate(ids, **options)
        drawn = torch.rand(1)
        torch.manual_seed(3 + rank)
        found = sharded.generate(ids, **options)
        assert torch.equal(found, expected), options
        assert torch.equal(torch.rand(1), drawn)
        assert not found.requires_grad
        new = found if model.config.is_encoder_decoder else found[:, ids.shape[1] :]
        assert len(set(new.flatten().tolist())) > 2


def tokens_are_those_of_the_plain_model(rank: int) -> None:
    same_tokens(llama, rank)


def tokens_of_other_models(rank: int) -> None:
    """Of one whose head is tied, and of an encoder and a decoder."""
    same_tokens(gpt2, rank)
    same_tokens(t5, rank)


def training_goes_on_between_calls(rank: int) -> None:
    model = llama().train()
    sharded = graphshard.compile(llama().train(), graphshard.BlockPolicy())
    ids = torch.randint(8, 96, (2, 8), generator=torch.Generator().manual_seed(5))
    for module in (model, sharded):
        optim = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(2):
            module(input_ids=ids, labels=ids).loss.backward()
            optim.step()
            optim.zero_grad()
            module.eval()
            tokens = module.generate(prompts(rank), max_new_tokens=8)
            module.train()
        if module is model:
            expected = tokens
    assert torch.equal(tokens, expected)
    assert len(sharded.programs) == 1
    sharded.generation_config.max_new_tokens = 3  # as of the plain model
    assert sharded.generate(prompts(rank)).shape[1] == prompts(rank).shape[1] + 3


def the_result_may_be_an_object(rank: int) -> None:
    sharded = graphshard.compile(llama(), graphshard.BlockPolicy())
    options = {"max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
    expected = llama().generate(prompts(rank), **options)
    found = sharded.generate(prompts(rank), **options)
    assert type(found) is type(expected)
    assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def units_are_gathered_one_by_one(rank: int) -> None:
    sharded = graphshard.compile(llama(), graphshard.BlockPolicy())
    root, *blocks = sharded.plan.units
    bound = root.unsharded_bytes + 2 * blocks[0].unsharded_bytes
    ids = prompts(rank)
    options = {"max_new_tokens": 5 + 4 * rank, "eos_token_id": None}
    with sharded.gathered(max_bytes=bound) as model:
        real = [
            fqn
            for fqn, layer in enumerate(model.model.layers)
            if all(p.device.type != "meta" for p in layer.parameters())
        ]
        assert real == [0]  # the first block fits beside the root and one more
        found = model.generate(ids, synced_gpus=True, **options)
    assert torch.equal(found, llama().generate(ids, **options))
    assert all(p.device.type == "meta" for p in model.parameters())

    def parts() -> None:
        with sharded.gathered(max_bytes=bound) as model:
            model.generate(ids, **options)

    message = error_of(parts, FingerprintError)
    assert "gathers model.layers.1" in message
    with torch.no_grad():
        assert torch.equal(sharded(ids).logits, llama()(ids).logits)


def what_no_graph_can_be_names_the_way_out(rank: int) -> None:
    class Until(LlamaForCausalLM):
        def last(self, ids: Tensor) -> Tensor:
            while ids[0, -1] != 7 and ids.shape[1] < 12:
                ids = torch.cat([ids, self(ids).logits[:, -1:].argmax(-1)], 1)
            return ids

    plain = Until(llama().config).eval()
    plain.load_state_dict(llama().state_dict())
    sharded = graphshard.compile(plain, graphshard.BlockPolicy())
    with torch.no_grad():
        with pytest.raises((CaptureError, FingerprintError)) as caught:
            sharded.last(prompts(rank))
        assert "sharded.run_eagerly('last', ...)" in "".join(caught.value.__notes__)
        assert torch.equal(sharded.run_eagerly("last", prompts(rank)), plain.last(prompts(rank)))
    dist.barrier()


QUICK = [tokens_are_those_of_the_plain_model]

test_on_two_ranks = on_ranks(QUICK, 2, timeout=300)
test_more_on_two_ranks = pytest.mark.slow(on_ranks(checks_of(globals(), but=QUICK), 2, timeout=300))
