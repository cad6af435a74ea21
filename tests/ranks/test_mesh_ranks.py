"""Meshes of two dimensions on real ranks: state, errors; which ranks they are made of."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Heads, TiedGPT, TwoOutputs, tokens_of
from ranks import checks_of, on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graphshard
from graphshard.errors import (
    CheckpointError,
    CollectiveError,
    FingerprintError,
    PlanError,
    PolicyError,
)

BLOCK = graphshard.BlockPolicy({"Block"}, strategy="HYBRID_SHARD")


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


# -- state --------------------------------------------------------------------------------------


def parameters_as_fully_shard_has_them(rank: int) -> None:
    mesh = two_by_two()
    sharded = graphshard.compile(TiedGPT(1), BLOCK, mesh=mesh)
    assert (sharded.plan.world_size, sharded.plan.shard_size, sharded.plan.replicas) == (4, 2, 2)
    theirs = TiedGPT(1)
    torch.distributed.fsdp.fully_shard(theirs, mesh=mesh)
    for name, param in theirs.named_parameters():
        mine = sharded.get_parameter(name)
        assert isinstance(mine, DTensor)
        assert mine.placements == param.placements == (Replicate(), Shard(0))
        assert mine.device_mesh == mesh
        assert mine.to_local().shape == param.to_local().shape
    whole = graphshard.compile(
        TiedGPT(1), graphshard.BlockPolicy({"Block"}, strategy="NO_SHARD"), mesh=mesh
    )
    assert whole.get_parameter("embed.weight").placements == (Replicate(), Replicate())


def sizes_instead_of_a_mesh(rank: int) -> None:
    for sizes in ((2, 2), "2x2"):
        sharded = graphshard.compile(TiedGPT(1), BLOCK, mesh=sizes)
        assert sharded.plan.mesh_shape == (2, 2)
        assert sharded.get_parameter("embed.weight").device_mesh == two_by_two()
    flat = graphshard.compile(TiedGPT(1), graphshard.BlockPolicy({"Block"}), mesh=[4])
    assert flat.plan.mesh_shape == (4,)
    with pytest.raises(PlanError, match=r"\(2, 3\) has 6 ranks, but world_size is 4"):
        graphshard.compile(TiedGPT(1), BLOCK, mesh="2x3")


def values_reach_every_replica(rank: int) -> None:
    mesh = two_by_two()
    torch.manual_seed(rank)
    model = TiedGPT(1)
    policy = graphshard.BlockPolicy({"Block"}, strategy="HYBRID_SHARD", sync_module_states=True)
    synced = graphshard.compile(model, policy, mesh=mesh)
    torch.manual_seed(0)
    first = TiedGPT(1)
    for name, param in first.named_parameters():
        assert torch.equal(synced.get_parameter(name).full_tensor(), param)

    with torch.device("meta"):
        empty = TiedGPT(1)
    loaded = graphshard.compile(empty, BLOCK, mesh=mesh)
    with pytest.raises(CheckpointError, match=r"no 'embed\.weight'"):
        loaded.load_full_state_dict({"wrong": torch.ones(1)} if rank == 0 else None)
    loaded.load_full_state_dict(first.state_dict() if rank == 0 else None)
    again = graphshard.compile(empty, BLOCK, mesh=mesh)
    again.load_state_dict(loaded.state_dict())
    for name, param in first.named_parameters():
        assert torch.equal(again.get_parameter(name).full_tensor(), param)

    made = graphshard.compile(empty, BLOCK, mesh=mesh)
    made.init_weights(seed=1)
    locals_ = [None] * 4
    dist.all_gather_object(locals_, made.get_parameter("blocks.0.up.weight").to_local().clone())
    assert torch.equal(locals_[0], locals_[2])
    assert torch.equal(locals_[1], locals_[3])
    assert not torch.equal(locals_[0][:16], locals_[1][:16])


# -- ranks --------------------------------------------------------------------------------------


def replicas_that_disagree(rank: int) -> None:
    """Ranks 0 and 1 agree, and 2 and 3 do: only the whole mesh can tell."""
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({"Linear"}, strategy="HYBRID_SHARD", merge_below=0)
    sharded = graphshard.compile(Heads(), policy, mesh=two_by_two())
    with pytest.raises((FingerprintError, CollectiveError)) as raised:
        sharded(torch.ones(2, 4), rank // 2)
    assert "rank 2: forward all_gather of heads.1 over 2 ranks" in str(raised.value)


def two_outputs_one_gradient(rank: int) -> None:
    """What a backward for part of the outputs leaves out is averaged over no replica."""
    torch.manual_seed(0)
    model = TwoOutputs()
    policy = graphshard.SizePolicy(strategy="HYBRID_SHARD")
    sharded = graphshard.compile(model, policy, mesh=two_by_two())
    x = torch.full((2, 4), float(rank + 1))
    sharded(x)[0].sum().backward()
    assert sharded.b.weight.grad is None
    model(torch.full((2, 4), 2.5))[0].sum().backward()
    assert torch.equal(sharded.a.weight.grad.full_tensor(), model.a.weight.grad)


def nodes_without_a_mesh(rank: int) -> None:
    with pytest.raises(PolicyError, match="ranks per node is not known; start ranks with torchrun"):
        graphshard.compile(TiedGPT(1), BLOCK)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"),
        pytest.raises(PolicyError, match="each node has 3 of the 4"),
    ):
        graphshard.compile(TiedGPT(1), BLOCK)
    with pytest.raises(PolicyError, match=r"FULL_SHARD of unit \(root\) is for .* one dimension"):
        graphshard.compile(TiedGPT(1), graphshard.BlockPolicy({"Block"}), mesh=two_by_two())
    with pytest.raises(PolicyError, match=r"the mesh lies on cpu|'cuda:0' is not there"):
        graphshard.compile(TiedGPT(1), BLOCK, mesh=two_by_two(), device="cuda:0")
    three = init_device_mesh("cpu", (1, 2, 2))
    with pytest.raises(PolicyError, match="got one of 3 dimensions; pass one or two of them"):
        graphshard.compile(TiedGPT(1), BLOCK, mesh=three)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        assert graphshard.compile(TiedGPT(1), BLOCK).plan.mesh_shape == (1, 4)
    told = [w.filename for w in said if "4 ranks are on one: nothing is repl" in str(w.message)]
    assert told == ([__file__] if rank == 0 else [])
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        sharded = graphshard.compile(TiedGPT(1), BLOCK)
    assert sharded.plan.mesh_shape == (2, 2)
    param = sharded.get_parameter("embed.weight")
    assert param.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]


def part_of_a_larger_mesh(rank: int) -> None:
    """Two of four ranks train one model, the others another."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
    torch.manual_seed(rank // 2)
    sharded = graphshard.compile(TiedGPT(1), BLOCK, mesh=mesh["replicate", "shard"])
    assert (sharded.plan.world_size, sharded.plan.mesh_shape) == (2, (2, 1))
    sharded(*tokens_of(rank, 0)).backward()
    totals = [None] * 4
    grad = sharded.get_parameter("embed.weight").grad
    assert grad.to_local().shape == (19, 16)
    dist.all_gather_object(totals, grad.full_tensor())
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[2], totals[3])
    assert not torch.equal(totals[0], totals[2])


ON_FOUR = [values_reach_every_replica, replicas_that_disagree]
test_on_four_ranks = on_ranks(ON_FOUR, 4, timeout=400)
test_more_on_four_ranks = pytest.mark.slow(
    on_ranks(checks_of(globals(), but=ON_FOUR), 4, timeout=400)
)
