"""Meshes of two dimensions and partial reshard on real ranks, against `fully_shard` on the same
mesh (bit for bit) and against one process on all batches.
"""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from counted_bytes import ACTIVATION, LAYER, counted, settles, stack
from mesh_parity import BLOCK, GPT, by_one_process, like_fully_shard, mesh_of, near
from models import Odd, TiedGPT, tokens_of
from parity import by_graphshard, difference
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graphshard
from graphshard.errors import CheckpointError, CollectiveError, FingerprintError, PolicyError

# -- training -----------------------------------------------------------------------------------


def hybrid(rank: int) -> None:
    like_fully_shard(mesh_of(2, 2), {"reshard_after_forward": True}, strategy="HYBRID_SHARD")


def hybrid_checked(rank: int) -> None:
    """Freed parameters poisoned, every value's shape held against its node."""
    with mock.patch.dict(os.environ, GRAPHSHARD_CHECK="1"):
        mesh = mesh_of(2, 2, names=None)
        two_by_two = by_graphshard(GPT, 4, rank, mesh=mesh, strategy="HYBRID_SHARD")
        near(two_by_two, by_one_process())
        parts = by_graphshard(GPT, 4, rank, reshard_after_forward=2, reshard_root=True)
        near(parts, by_one_process())
        # What is gathered again is what was gathered, so nothing else may differ.
        whole = difference(parts, by_graphshard(GPT, 4, rank))
        assert whole.exact, whole


def hybrid_zero2(rank: int) -> None:
    mesh, options = mesh_of(2, 2), {"reshard_after_forward": False}
    like_fully_shard(mesh, options, strategy="HYBRID_SHARD_ZERO2")


def replicated(rank: int) -> None:
    near(by_graphshard(GPT, 4, rank, mesh=mesh_of(2, 2), strategy="NO_SHARD"), by_one_process())


def parts_of_two(rank: int) -> None:
    like_fully_shard(None, {"reshard_after_forward": 2}, reshard_after_forward=2, exact=False)


def odd_parameters(rank: int) -> None:
    """Frozen, unused, without dimensions, of one row: as the mean of four single processes."""
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(5, 16, generator=generator) for _ in range(4)]
    torch.manual_seed(3)
    model = Odd().eval()
    alone = []
    for batch in batches:
        model.zero_grad()
        model(batch).backward()
        alone.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    mean = {name: torch.stack([each[name] for each in alone]).mean(0) for name in alone[0]}
    for shape, fields in (((2, 2), {}), ((1, 4), {"reshard_after_forward": 2})):
        policy = graphshard.BlockPolicy({"Block"}, strategy="HYBRID_SHARD", **fields)
        sharded = graphshard.compile(model, policy, mesh=mesh_of(*shape))
        sharded(batches[rank]).backward()
        grads = {n: p.grad for n, p in sharded.named_parameters() if p.grad is not None}
        assert grads.keys() == mean.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad.full_tensor(), mean[name], rtol=1e-5, atol=1e-7)
            assert grad.placements == sharded.get_parameter(name).placements


def parts_with_other_options(rank: int) -> None:
    """By unit, with recomputation, with gradients kept over a batch: nothing but bytes differ."""

    def gradients(policy: graphshard.Policy) -> list[torch.Tensor]:
        torch.manual_seed(2)
        sharded = graphshard.compile(TiedGPT(3), policy)
        with sharded.no_sync():
            torch.manual_seed(rank)
            sharded(*tokens_of(rank, 0)).backward()
        sharded(*tokens_of(rank, 1)).backward()
        return [p.grad.full_tensor() for p in sharded.parameters()]

    blocks = graphshard.BlockPolicy({"Block"})
    expected = gradients(blocks)
    ours = graphshard.ModulePolicy(
        {"blocks.0": {"reshard_after_forward": 2}, "blocks.2": {"reshard_after_forward": False}},
        base=blocks,
        reshard_root=True,
    )
    recomputed = graphshard.BlockPolicy({"Block"}, reshard_after_forward=2, recompute="units")
    for policy in (ours, recomputed):
        assert all(map(torch.equal, gradients(policy), expected)), policy


def parts_take_their_share(rank: int) -> None:
    """Between forward and backward half of each layer stays; after backward nothing does."""
    sharded, x = stack(reshard_after_forward=2)
    live, base = counted(sharded, x)
    with live:
        loss = sharded(x)
        # All but the first, which no backward reads since the input needs no gradient.
        settles(live, base + 5 * LAYER // 2 + 6 * ACTIVATION + 4)
        del loss  # nobody ran backward
        settles(live, base)
        loss = sharded(x)
        loss.backward()
        settles(live, base + 6 * LAYER // 4 + 4)


# -- state --------------------------------------------------------------------------------------


def parameters_as_fully_shard_has_them(rank: int) -> None:
    mesh = mesh_of(2, 2)
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


def values_reach_every_replica(rank: int) -> None:
    mesh = mesh_of(2, 2)
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


def training_goes_on_from_its_state(rank: int) -> None:
    """Parameters and optimizer state, full and sharded, saved on one mesh and loaded on another."""

    def new(shape: tuple[int, ...], **fields: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(5)
        policy = graphshard.BlockPolicy({"Block"}, **fields)
        mesh = mesh_of(*shape, names=None)
        sharded = graphshard.compile(TiedGPT(1), policy, mesh=mesh)
        return sharded, torch.optim.AdamW(sharded.parameters(), lr=0.1)

    def step(sharded: Any, optim: torch.optim.Optimizer, number: int) -> torch.Tensor:
        torch.manual_seed(10 * number + rank)
        loss = sharded(*tokens_of(rank, number))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    first = new((2, 2), strategy="HYBRID_SHARD")
    step(*first, 0)
    full = first[0].full_state_dict(rank0_only=False)
    moments = first[0].optimizer_state_dict(first[1], kind="full", rank0_only=False)
    sharded = {name: value.clone() for name, value in first[0].state_dict().items()}
    parts = copy.deepcopy(first[0].optimizer_state_dict(first[1]))
    again = new((2, 2), strategy="HYBRID_SHARD")
    again[0].load_state_dict(sharded)
    again[0].load_optimizer_state_dict(again[1], parts)
    other = new((4,), strategy="FULL_SHARD", reshard_after_forward=2)
    other[0].load_full_state_dict(full)
    other[0].load_optimizer_state_dict(other[1], moments)
    expected = [step(*first, number) for number in (1, 2)]
    assert torch.equal(torch.stack(expected), torch.stack([step(*again, n) for n in (1, 2)]))
    torch.testing.assert_close(expected, [step(*other, n) for n in (1, 2)], rtol=1e-5, atol=1e-6)


def clipping(rank: int) -> None:
    """The norm is that of the averaged gradient, each shard counted once."""
    torch.manual_seed(0)
    sharded = graphshard.compile(TiedGPT(1), BLOCK, mesh=mesh_of(2, 2))
    torch.manual_seed(rank)
    sharded(*tokens_of(rank, 0)).backward()
    grads = [p.grad.full_tensor() for p in sharded.parameters()]
    expected = torch.stack([g.norm() for g in grads]).norm()
    for clip in (torch.nn.utils.clip_grad_norm_, None):
        norm = sharded.clip_grad_norm_(1e9) if clip is None else clip(sharded.parameters(), 1e9)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(norm, expected)


# -- ranks --------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.heads[which](x)


def replicas_that_disagree(rank: int) -> None:
    """Ranks 0 and 1 agree, and 2 and 3 do: only the whole mesh can tell."""
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({"Linear"}, strategy="HYBRID_SHARD")
    sharded = graphshard.compile(Branches(), policy, mesh=mesh_of(2, 2))
    with pytest.raises((FingerprintError, CollectiveError)) as raised:
        sharded(torch.ones(2, 4), rank // 2)
    assert "rank 2: forward all_gather of heads.1 over 2 ranks" in str(raised.value)


def two_outputs_one_gradient(rank: int) -> None:
    """What a backward for part of the outputs leaves out is averaged over no replica."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model = Two()
    policy = graphshard.SizePolicy(strategy="HYBRID_SHARD")
    sharded = graphshard.compile(model, policy, mesh=mesh_of(2, 2))
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
    three = init_device_mesh("cpu", (1, 2, 2))
    with pytest.raises(PolicyError, match="got one of 3 dimensions; pass one or two of them"):
        graphshard.compile(TiedGPT(1), BLOCK, mesh=three)
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
    dist.all_gather_object(totals, sharded.get_parameter("embed.weight").grad.full_tensor())
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[2], totals[3])
    assert not torch.equal(totals[0], totals[2])


ON_FOUR = [
    hybrid,
    parts_take_their_share,
    values_reach_every_replica,
    clipping,
    replicas_that_disagree,
]
MORE_ON_FOUR = [
    hybrid_checked,
    hybrid_zero2,
    parts_of_two,
    replicated,
    parts_with_other_options,
    odd_parameters,
    parameters_as_fully_shard_has_them,
    training_goes_on_from_its_state,
    two_outputs_one_gradient,
    nodes_without_a_mesh,
    part_of_a_larger_mesh,
]

test_on_four_ranks = on_ranks(ON_FOUR, 4, timeout=400)
test_more_on_four_ranks = pytest.mark.slow(on_ranks(MORE_ON_FOUR, 4, timeout=400))


def replicas_only(rank: int) -> None:
    found = like_fully_shard(
        mesh_of(2, 1), {"reshard_after_forward": True}, strategy="HYBRID_SHARD"
    )
    assert found.exact


def shards_only(rank: int) -> None:
    found = like_fully_shard(
        mesh_of(1, 2), {"reshard_after_forward": False}, strategy="HYBRID_SHARD_ZERO2"
    )
    assert found.exact


ON_TWO = [replicas_only, shards_only]

test_on_two_ranks = pytest.mark.slow(on_ranks(ON_TWO, 2, timeout=200))
