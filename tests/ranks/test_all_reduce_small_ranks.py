"""Gradients of small units by one all_reduce on ranks: numbers as by reduce_scatter."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_parity import GPT, by_one_process, mesh_of, near
from models import Odd
from parity import by_graphshard, difference
from ranks import on_ranks

import graphshard
from graphshard import BlockPolicy, MixedPrecision, SizePolicy

ALL = 1 << 40


def same_as_reduce_scatter(rank: int, *, exact: bool, **fields: Any) -> None:
    world_size = dist.get_world_size()
    scattered = by_graphshard(GPT, world_size, rank, **fields)
    whole = by_graphshard(GPT, world_size, rank, all_reduce_below=ALL, **fields)
    if exact:
        assert difference(whole, scattered).exact
    near(whole, scattered)


def bit_for_bit(rank: int) -> None:
    """A sum of two has one order."""
    same_as_reduce_scatter(rank, exact=True)
    some = 100_000  # the blocks, and not the root with its embedding
    whole = by_graphshard(GPT, 2, rank, all_reduce_below=some)
    assert difference(whole, by_graphshard(GPT, 2, rank)).exact


def bit_for_bit_in_bf16(rank: int) -> None:
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    world_size = dist.get_world_size()
    scattered, whole = (
        by_graphshard(GPT, world_size, rank, mixed_precision=mixed, all_reduce_below=below)
        for below in (0, ALL)
    )
    assert difference(whole, scattered).exact


def checked(rank: int) -> None:
    """Every value's shape is held against its node, and the copy that was reduced is gone."""
    torch.manual_seed(0)
    policy = SizePolicy(0, all_reduce_below=ALL)
    sharded = graphshard.compile(Odd(), policy, check=True)
    sharded(torch.randn(5, 16)).backward()
    assert any(event.op == "all_reduce_shard" for event in sharded.program.schedule())
    for unit in sharded.plan.units:
        grads = [sharded.get_parameter(name).grad for name in unit.params]
        sharded_by_dim = zip(unit.layouts, grads, strict=True)
        shards = [g.to_local() for layout, g in sharded_by_dim if layout.sharded and g is not None]
        kept = sum(prod(layout.shard_shape) for layout in unit.layouts if layout.sharded)
        assert all(shard.untyped_storage().nbytes() <= 4 * kept for shard in shards), unit.fqn


def accumulates(rank: int) -> None:
    """Gradients kept by no_sync are averaged by it later."""
    results = []
    for below in (0, ALL):
        torch.manual_seed(0)
        sharded = graphshard.compile(GPT.model(), BlockPolicy({"Block"}, all_reduce_below=below))
        with sharded.no_sync():
            loss_of = sharded(**GPT.inputs(3 + rank))
            (loss_of if isinstance(loss_of, torch.Tensor) else loss_of.loss).backward()
        loss_of = sharded(**GPT.inputs(7 + rank))
        (loss_of if isinstance(loss_of, torch.Tensor) else loss_of.loss).backward()
        results.append([p.grad.full_tensor() for p in sharded.parameters() if p.grad is not None])
    assert all(map(torch.equal, *results))


def near_on_four(rank: int) -> None:
    same_as_reduce_scatter(rank, exact=False)
    near(by_graphshard(GPT, 4, rank, all_reduce_below=ALL), by_one_process())


def hybrid(rank: int) -> None:
    mesh = mesh_of(2, 2)
    same_as_reduce_scatter(rank, exact=True, mesh=mesh, strategy="HYBRID_SHARD")


ON_TWO = [bit_for_bit, checked, accumulates]
ON_FOUR = [near_on_four, hybrid]


test_on_two_ranks = on_ranks(ON_TWO, 2, timeout=200)
test_in_bf16 = pytest.mark.slow(on_ranks([bit_for_bit_in_bf16], 2, timeout=200))
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=200))
