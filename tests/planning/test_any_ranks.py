"""On no number of ranks is a model replicated, or padded to much more than itself."""

from __future__ import annotations

import pytest
import torch
import transformers

from graphshard.planning.planner import make_plan
from graphshard.policy.units import BlockPolicy

RANKS = (5, 6, 7, 12, 24, 40, 48, 72, 96, 256, 384, 512, 1000, 1024)

MODELS = {
    "Mixtral 8x7B": (transformers.MixtralForCausalLM, {}, 1.01),
    "gpt-oss-120b": (transformers.GptOssForCausalLM, {}, 1.02),
    "GPT-2 XL": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 1600, "n_layer": 2, "n_head": 25},
        1.03,
    ),
    "BERT-base": (transformers.BertForMaskedLM, {}, 1.03),
    "Qwen2.5-7B": (
        transformers.Qwen2ForCausalLM,
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
         "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
        1.015,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_all_ranks_are_little_more_than_the_model(name):
    kind, changes, bound = MODELS[name]
    config = kind.config_class(**changes)
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = kind(config)
    total = sum(p.numel() * p.itemsize for p in model.parameters())
    for ranks in RANKS:
        plan = make_plan(model, BlockPolicy(), world_size=ranks)
        stored = ranks * sum(unit.sharded_bytes for unit in plan.units)
        gathered = sum(unit.unsharded_bytes for unit in plan.units)
        assert total <= gathered == stored <= bound * total, ranks
        assert all(layout.sharded or not layout.shape for layout in plan.layouts.values())
