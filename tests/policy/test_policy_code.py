"""A policy's text is code that makes it again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphshard
from graphshard import BlockPolicy, LambdaPolicy, MixedPrecision, ModulePolicy, SizePolicy

BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
OWN = graphshard.Hardware.load("h200").with_(gpus_per_node=4)


@pytest.mark.parametrize(
    "policy",
    [
        BlockPolicy(),
        BlockPolicy({"Block", "Head"}, strategy="HYBRID_SHARD", backward_prefetch=None),
        BlockPolicy("Block", recompute={"budget", "Block"}, memory_budget=12_345_678),
        BlockPolicy("Block", recompute="units", mixed_precision=BF16, offload=["params"]),
        BlockPolicy("Block", schedule="overlap", hardware="h200"),
        BlockPolicy("Block", schedule="overlap", hardware=OWN),
        SizePolicy(),
        SizePolicy(1_000, force_leaf={nn.Conv2d}, exclude=()),
        SizePolicy(reshard_after_forward=4, forward_prefetch=2, reshard_root=True),
        ModulePolicy({"layers.3": {"reshard_after_forward": False}}, base=BlockPolicy({"Block"})),
        ModulePolicy(
            {
                nn.Embedding: {"strategy": "NO_SHARD", "mixed_precision": BF16},
                "*.experts": {"placement": {"w?": 1}, "unit": False},
            },
            strategy="SHARD_GRAD_OP",
            ignored=["head.*"],
            sync_module_states=True,
            notes=("it's one", "two"),
        ),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_the_text_of_a_policy_makes_it_again(policy):
    assert eval(repr(policy), {"graphshard": graphshard, "torch": torch}) == policy


class Block(nn.Linear):
    pass


def test_what_is_no_name_is_shown():
    assert repr(BlockPolicy({Block}, recompute=Block)) == (
        "graphshard.BlockPolicy({'Block'}, recompute='Block')"
    )
    assert repr(SizePolicy(7, exclude={Block})).endswith(f"exclude={{{Block.__module__}.Block}})")
    assert repr(LambdaPolicy(callable, ignored=nn.Linear(1, 1))) == (
        "graphshard.LambdaPolicy(callable, ignored=(<Linear>,))"
    )
