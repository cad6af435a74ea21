"""What is saved is a copy, under each strategy and in the background."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_tensors import full_grads
from models import Block, TiedGPT, tokens_of
from ranks import on_ranks
from state_checks import assert_same, full_state, seeded, shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.policy.strategy import Strategy


def gpt() -> nn.Module:
    return TiedGPT(1)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # One by one: ignored parameters are plain tensors, the others are not.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)


def moments(module: graphshard.ShardedModule, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = module.optimizer_state_dict(optim, kind="full", rank0_only=False)["state"]
    return {f"{name}/{key}": value for name, e in state.items() for key, value in e.items()}


def step(module: nn.Module, optim: torch.optim.Optimizer) -> None:
    # One batch for all ranks, since nobody reduces the gradients of ignored parameters.
    module(*tokens_of(0, 0)).backward()
    optim.step()
    optim.zero_grad()


def in_the_background(rank: int) -> None:
    """A save in the background has the values of its call, under every strategy."""
    names = ("replicate", "shard")
    shapes = {Strategy.HYBRID_SHARD: (1, 2), Strategy.HYBRID_SHARD_ZERO2: (2, 1)}
    for strategy in Strategy:
        shape = shapes.get(strategy)
        mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=names)
        # On the host once where each rank has a part, and once where all have all rows.
        on_host = strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD_ZERO2)
        for offload in (None, "params") if on_host else (None,):
            policy = graphshard.BlockPolicy({Block}, strategy=strategy, offload=offload)
            sharded = graphshard.compile(seeded(gpt), policy, mesh=mesh)
            optim = adamw(sharded)
            step(sharded, optim)
            folder, extra = shared_folder(), {"seen": [torch.ones(2), (torch.ones(1), 3)]}
            expected, wanted = full_state(sharded), moments(sharded, optim)
            saving = sharded.save_checkpoint(folder / "c", optim, extra=extra, background=True)
            extra["seen"][0].zero_()
            extra["seen"][1][0].zero_()
            step(sharded, optim)
            assert saving is not None
            saving.result()
            found: dict[str, Any] = {}
            sharded.load_checkpoint(folder / "c", optim, extra=found)
            assert_same(full_state(sharded), expected)
            assert_same(moments(sharded, optim), wanted)
            assert str(found) == "{'seen': [tensor([1., 1.]), (tensor([1.]), 3)]}"


def what_is_saved_is_a_copy(rank: int) -> None:
    """Where a rank has all rows, too: training goes on without changing it."""
    names = ("replicate", "shard")
    for shape, strategy in (((2, 1), "HYBRID_SHARD"), ((1, 2), "HYBRID_SHARD"), (None, "NO_SHARD")):
        mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = graphshard.BlockPolicy({Block}, strategy=strategy)
        sharded = graphshard.compile(seeded(gpt), policy, mesh=mesh)
        optim = adamw(sharded)
        step(sharded, optim)
        saved = full_state(sharded), moments(sharded, optim)
        before = [{name: value.clone() for name, value in each.items()} for each in saved]
        step(sharded, optim)
        for each, expected in zip(saved, before, strict=True):
            assert_same(each, expected)


def gradients_seen_without_writeback_are_copies(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for options in ({"strategy": "HYBRID_SHARD", "mesh": mesh}, {"strategy": "NO_SHARD"}):
        policy = graphshard.BlockPolicy({Block}, strategy=options.pop("strategy"))
        sharded = graphshard.compile(seeded(gpt), policy, **options)
        sharded(*tokens_of(0, 0)).backward()
        before = full_grads(sharded)
        with sharded.unsharded(with_grads=True, writeback=False) as params:
            for param in set(params.values()):
                param.grad.zero_()
        assert_same(full_grads(sharded), before)


ON_TWO = [
    what_is_saved_is_a_copy,
    gradients_seen_without_writeback_are_copies,
]

test_on_two_ranks = pytest.mark.slow(on_ranks(ON_TWO, 2))
test_on_two_ranks_quickly = on_ranks([in_the_background], 2)
