"""Every model trains on ranks as one process does on all batches, to the bit where `fully_shard`
does.
"""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
from models import CASES, TiedGPT, tokens_of
from ranks import on_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh

import graphshard

FULLY_SHARD_IS_EXACT = {"gpt", "llama", "gpt2", "bert", "regnet"}  # on two ranks
QUICK = ("gpt", "t5", "regnet")  # tied weights, shared modules, buffers
BY_COST = {"schedule": "overlap", "hardware": "h100-sxm"}


def train_as_in_one_process(rank: int, names: tuple[str, ...], fields: dict[str, Any]) -> None:
    for name in names:
        _, exact = parity.check(parity.by_graphshard(CASES[name], **fields), CASES[name])
        if torch.distributed.get_world_size() == 2:
            assert exact == (name in FULLY_SHARD_IS_EXACT), name


@pytest.mark.parametrize(
    ("ranks", "names", "fields"),
    [
        (2, QUICK, {}),
        pytest.param(4, QUICK[:1], {}, marks=pytest.mark.slow),
        pytest.param(2, tuple(CASES.keys() - set(QUICK)), {}, marks=pytest.mark.slow),
        pytest.param(2, tuple(CASES), BY_COST, marks=pytest.mark.slow),
    ],
)
def test_models_train_as_in_one_process(
    ranks: int, names: tuple[str, ...], fields: dict[str, Any]
) -> None:
    run_ranks(train_as_in_one_process, ranks, names, fields, timeout=500)


class OnAMesh:
    """A check that a model trains as by `fully_shard` on a mesh, and where parts are kept."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, rank: int) -> None:
        case, expected = CASES[self.__name__], parity.by_one_process(CASES[self.__name__])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        parts = {"reshard_after_forward": 2}
        for on, options, fields in (
            (mesh, {"reshard_after_forward": True}, {"strategy": "HYBRID_SHARD"}),
            (None, parts, parts),
        ):
            ours = parity.by_graphshard(case, mesh=on, **fields)
            theirs = parity.by_fully_shard(case, mesh=on, **options)
            same = near(ours, theirs)
            # Bit for bit where no average is over more than two ranks.
            if on is not None and self.__name__ != "t5":
                assert same.exact, same
                assert same.params == same.buffers == 0, same
            near(ours, expected)


def near(ours: parity.Training, expected: parity.Training) -> parity.Difference:
    found = parity.difference(ours, expected)
    assert found.losses == 0, found
    assert max(found.grads.values()) <= 1e-6, found
    assert found.params <= 0.01 * parity.LR * parity.STEPS, found
    return found


test_models_on_four_ranks = pytest.mark.slow(on_ranks([*map(OnAMesh, CASES)], 4, timeout=595))


def test_a_single_rank_without_a_group() -> None:
    torch.manual_seed(0)
    model = TiedGPT(1)
    sharded = graphshard.compile(model, graphshard.BlockPolicy({"Block"}, strategy="HYBRID_SHARD"))
    assert sharded.plan.mesh_shape == (1, 1)
    for each in (model, sharded):
        torch.manual_seed(0)
        each(*tokens_of(0, 0)).backward()
    assert torch.equal(sharded.embed.weight.grad, model.embed.weight.grad)
