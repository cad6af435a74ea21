"""Every model trains on ranks as one process does on all batches, to the bit where `fully_shard`
does.
"""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
from mesh_parity import BLOCK, like_fully_shard, mesh_of
from models import CASES, TiedGPT, tokens_of
from ranks import on_ranks, run_ranks

import graphshard

FULLY_SHARD_IS_EXACT = {"gpt", "llama", "gpt2", "bert", "regnet"}  # on two ranks
QUICK = ("gpt", "t5", "regnet")  # tied weights, shared modules, buffers
BY_COST = {"schedule": "overlap", "hardware": "h100-sxm"}


@pytest.mark.parametrize(
    ("ranks", "names", "fields"),
    [
        (2, QUICK, {}),
        (4, QUICK[:1], {}),
        pytest.param(2, tuple(CASES.keys() - set(QUICK)), {}, marks=pytest.mark.slow),
        pytest.param(2, tuple(CASES), BY_COST, marks=pytest.mark.slow),
    ],
)
def test_models_train_as_in_one_process(
    ranks: int, names: tuple[str, ...], fields: dict[str, Any]
) -> None:
    for of_rank in run_ranks(parity.compare, ranks, names, fields, timeout=500):
        for name in names:
            parity.check(of_rank[name])
            if ranks == 2:
                assert of_rank[name].fully_shard.exact == (name in FULLY_SHARD_IS_EXACT), name


class OnAMesh:
    """A check that a model trains as by `fully_shard` on a mesh, and where parts are kept."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, rank: int) -> None:
        case, name = CASES[self.__name__], self.__name__
        options = {"reshard_after_forward": True}
        mesh = mesh_of(2, 2)
        like_fully_shard(mesh, options, case=case, exact=name != "t5", strategy="HYBRID_SHARD")
        parts = {"reshard_after_forward": 2}
        like_fully_shard(None, parts, case=case, exact=False, **parts)


test_models_on_four_ranks = pytest.mark.slow(on_ranks([*map(OnAMesh, CASES)], 4, timeout=595))


def test_a_single_rank_without_a_group() -> None:
    torch.manual_seed(0)
    model = TiedGPT(1)
    sharded = graphshard.compile(model, BLOCK)
    assert sharded.plan.mesh_shape == (1, 1)
    for each in (model, sharded):
        torch.manual_seed(0)
        each(*tokens_of(0, 0)).backward()
    assert torch.equal(sharded.embed.weight.grad, model.embed.weight.grad)
