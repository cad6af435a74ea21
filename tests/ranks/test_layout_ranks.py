"""Other dims, copies and options per unit, on two ranks and on four."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from layouts import (
    Experts,
    assert_same,
    by_fully_shard,
    compiled,
    exact,
    model,
    trained,
    trained_alone,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard

from graphshard.program import packing

pytestmark = pytest.mark.slow  # each of its ranks starts and compiles for tens of seconds

# -- other dims --------------------------------------------------------------------------------


def along_dim(value: nn.Parameter) -> Shard | None:
    return Shard(1) if value.ndim == 3 else None


def experts_are_split_along_another_dim(rank: int) -> None:
    sharded = compiled({Experts: {"placement": {"w": 1}}}, rank)
    w = sharded.get_parameter("blocks.0.w")
    size = dist.get_world_size()
    assert w.placements == (Shard(1),)
    assert w.to_local().shape == (2, 128 // size, 128)
    assert torch.equal(full(w), model().blocks[0].w)
    got = trained(sharded, rank)
    assert_same(got, by_fully_shard(rank, along_dim), exact=exact())
    assert_same(got, trained_alone(rank), exact=exact())


def the_last_dim_and_copies_train_alike(rank: int) -> None:
    sharded = compiled(
        {Experts: {"placement": {"w": 2, "gate.weight": 1, "gate.bias": "replicate"}}}, rank
    )
    gate = sharded.get_submodule("blocks.1.gate")
    assert gate.weight.placements == (Shard(1),)
    assert not gate.bias.placements[0].is_shard()
    assert_same(trained(sharded, rank), trained_alone(rank), exact=exact())


def packing_changes_nothing(rank: int) -> None:
    modules = {Experts: {"placement": {"w": 2, "gate.weight": 1}}}
    expected = trained(compiled(modules, rank), rank, steps=1)
    for gather, reduce in ((1 << 20, 0), (0, 1 << 10)):
        with (
            mock.patch.dict(packing.GATHER_BELOW, gloo=gather),
            mock.patch.dict(packing.REDUCE_BELOW, gloo=reduce),
        ):
            assert_same(trained(compiled(modules, rank), rank, steps=1), expected, exact=True)


def padding_is_avoided_by_itself(rank: int) -> None:
    sharded = compiled({}, rank)
    by_itself = 0 if dist.get_world_size() == 2 else 1
    assert sharded.plan.layouts["blocks.0.w"].dim == by_itself
    assert_same(trained(sharded, rank), trained_alone(rank), exact=exact())


def state_of_other_dims_goes_out_and_in(rank: int) -> None:
    sharded = compiled({Experts: {"placement": {"w": 2}}}, rank)
    trained(sharded, rank, steps=1)
    state = {name: full(value) for name, value in sharded.state_dict().items()}
    again = compiled({Experts: {"placement": {"w": 1}}}, rank)
    again.load_full_state_dict(state if rank == 0 else None)
    for name, value in again.state_dict().items():
        assert torch.equal(full(value), state[name]), name
    once_more = compiled({}, rank)
    once_more.load_state_dict(state)
    for name, value in once_more.state_dict().items():
        assert torch.equal(full(value), state[name]), name


# -- module policy -----------------------------------------------------------------------------


def units_of_their_own_kind_train_alike(rank: int) -> None:
    expected = trained_alone(rank)
    for modules in (
        {"blocks.1": {"reshard_after_forward": False}, "embed": {}},
        {"blocks.1": {"strategy": "NO_SHARD"}, "": {"reshard_after_forward": True}},
        {Experts: {"strategy": "SHARD_GRAD_OP"}, "blocks.0": {"strategy": "FULL_SHARD"}},
    ):
        assert_same(trained(compiled(modules, rank), rank), expected, exact=exact())


ALL = [
    experts_are_split_along_another_dim,
    the_last_dim_and_copies_train_alike,
    packing_changes_nothing,
    padding_is_avoided_by_itself,
    state_of_other_dims_goes_out_and_in,
    units_of_their_own_kind_train_alike,
]
# The checks that differ in kind on four ranks: ranks without rows, sums in more than one order.
ON_FOUR = [
    experts_are_split_along_another_dim,
    padding_is_avoided_by_itself,
    units_of_their_own_kind_train_alike,
]
REST = [check for check in ALL if check not in ON_FOUR]

test_on_two_ranks = on_ranks(ALL, 2, timeout=500)
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=500))
test_the_rest_on_four_ranks = pytest.mark.slow(on_ranks(REST, 4, timeout=580))
