"""Ranks that run different programs all of them know: an error on every rank, before any data."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from models import Heads, TwoOutputs
from ranks import checks_of, error_of, on_ranks
from torch import nn

import graphshard
from graphshard.errors import FingerprintError

X = torch.ones(2, 4)


def compiled(model: nn.Module, strategy: str = "FULL_SHARD") -> graphshard.ShardedModule:
    again = True if strategy == "FULL_SHARD" else None  # gathers in backward, too
    policy = graphshard.BlockPolicy(
        {nn.Linear}, strategy=strategy, merge_below=0, reshard_after_forward=again
    )
    return graphshard.compile(model, policy)


def heads_known(second: int, strategy: str = "FULL_SHARD") -> graphshard.ShardedModule:
    """Both programs have run on every rank."""
    sharded = compiled(Heads(second), strategy)
    for head in (0, 1):
        sharded(X, head).sum().backward()
    sharded.zero_grad()
    return sharded


def refused(call: Callable[[], object], sharded: graphshard.ShardedModule) -> str:
    """The error on every rank, soon, with no gradient set and the group still in order."""
    begin = time.monotonic()
    message = error_of(call, FingerprintError)
    assert time.monotonic() - begin < 20.0  # not the group's timeout of 60
    assert all(p.grad is None for p in sharded.parameters())
    return message


def equal_shapes(rank: int) -> None:
    sharded = heads_known(4)
    message = refused(lambda: sharded(X, rank), sharded)
    assert "rank 0: forward all_gather of heads.0 over 2 ranks" in message
    assert "rank 1: forward all_gather of heads.1 over 2 ranks" in message
    sharded(X, 1).sum().backward()
    message = refused(lambda: sharded.zero_grad() or sharded(X, 1 - rank), sharded)
    assert "rank 0: forward all_gather of heads.1 over 2 ranks" in message


def replicated_gradients(rank: int) -> None:
    sharded = heads_known(9, "NO_SHARD")
    message = refused(lambda: sharded(X, rank).sum().backward(), sharded)
    assert "rank 0: backward all_reduce of heads.0 over 2 ranks" in message
    assert "rank 1: backward all_reduce of heads.1 over 2 ranks" in message


def other_backwards(rank: int) -> None:
    sharded = compiled(TwoOutputs())
    for output in (0, 1):
        sharded(X)[output].sum().backward()
    sharded.zero_grad()
    loss = sharded(X)[rank].sum()
    message = refused(loss.backward, sharded)
    assert "rank 0: backward reduce_scatter of a " in message
    assert "rank 1: backward reduce_scatter of b " in message


def a_backward_left_out(rank: int) -> None:
    sharded = heads_known(4)
    loss = sharded(X, 0).sum()
    message = refused(loss.backward if rank == 0 else lambda: sharded(X, 0), sharded)
    assert "rank 0: backward all_gather of heads.0" in message
    assert "rank 1: forward all_gather of trunk" in message


def no_gradients_on_one_rank(rank: int) -> None:
    sharded = heads_known(4)
    with torch.no_grad():
        sharded(X, 0)

    def call() -> None:
        with torch.set_grad_enabled(rank == 0):
            sharded(X, 0)

    message = refused(call, sharded)
    assert "rank 0: backward all_gather of heads.0" in message
    assert "rank 1: nothing more" in message
    assert (
        "rank 0 calls forward with gradients, rank 1 calls forward without gradients: every rank "
        "must call forward, also where one rank alone evaluates"
    ) in message


def modules_in_another_order(rank: int) -> None:
    modules = [heads_known(4), heads_known(4)]
    message = refused(lambda: modules[rank](X, 0), modules[rank])
    assert "the ranks call different modules" in message
    message = refused(lambda: modules[0](X, rank), modules[0])  # both still count alike
    assert "rank 1: forward all_gather of heads.1" in message
    assert "must call forward" not in message  # as they do


def a_replicated_forward_on_one_rank(rank: int) -> None:
    """A half without collectives concerns no other rank, whatever its backward would do."""
    sharded = heads_known(4, "NO_SHARD")
    if rank == 0:
        sharded(X, 1)
    sharded(X, 0).sum().backward()


def sizes_of_other_costs(rank: int) -> None:
    """FSDP's order does not mind; what is merged by cost depends on how long compute takes."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.zeros(400_000 if rank else 2, 4)
    compiled(copy.deepcopy(layers))(x).sum().backward()
    order = {"schedule": "overlap", "hardware": "cpu-gloo", "merge_below": 64}
    by_cost = graphshard.BlockPolicy({nn.Linear}, reshard_after_forward=True, **order)
    sharded = graphshard.compile(layers, by_cost)
    message = refused(lambda: sharded(x), sharded)
    assert "would issue different collectives" in message


test_on_two_ranks = on_ranks(checks_of(globals()), 2)
