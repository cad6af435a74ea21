"""Every model on meshes of two dimensions, and the policies for them on a single rank."""

from __future__ import annotations

import pytest
import torch
from mesh_parity import BLOCK, like_fully_shard, mesh_of
from models import CASES, TiedGPT, tokens_of
from ranks import run_ranks

import graphshard


def every_model(rank: int, name: str) -> None:
    case = CASES[name]
    hybrid = {"strategy": "HYBRID_SHARD"}
    # On T5 `fully_shard` is not bit-equal to one process either; see test_parity_two_ranks.
    options = {"reshard_after_forward": True}
    like_fully_shard(mesh_of(2, 2), options, case=case, exact=name != "t5", **hybrid)
    parts = {"reshard_after_forward": 2}
    like_fully_shard(None, parts, case=case, exact=False, **parts)
    # On one replica of four ranks; in two by two, groups of two are all that shard.
    like_fully_shard(mesh_of(1, 4), parts, case=case, exact=False, **hybrid, **parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_model_on_four_ranks(name: str) -> None:
    run_ranks(every_model, 4, name, timeout=600)


def test_a_single_rank_without_a_group() -> None:
    torch.manual_seed(0)
    model = TiedGPT(1)
    sharded = graphshard.compile(model, BLOCK)
    assert sharded.plan.mesh_shape == (1, 1)
    for each in (model, sharded):
        torch.manual_seed(0)
        each(*tokens_of(0, 0)).backward()
    assert torch.equal(sharded.embed.weight.grad, model.embed.weight.grad)
