"""Buffers of collectives from a registered pool: what it holds, when it is registered, refusals."""

from __future__ import annotations

import gc
import json
from typing import Any
from unittest import mock

import pytest
import torch
from models import Block, TiedGPT, tokens_of
from pools import pools_on_cpu
from ranks import Checks, error_of

import graphshard
from graphshard.cost.memory import memory_of
from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.program import packing
from graphshard.runtime.graph_lifetimes import release_of
from graphshard.torch_private import collective_pool

MIXED = graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def policy(kind: str = "nccl", **fields: Any) -> graphshard.BlockPolicy:
    return graphshard.BlockPolicy(Block, collective_memory=kind, **fields)


def trained(sharded: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = sharded(*tokens_of(rank, step))
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in sharded.parameters())]
        sharded.zero_grad()
    return found


def module(kind: str = "nccl", **fields: Any) -> Any:
    torch.manual_seed(0)
    return graphshard.compile(TiedGPT(2), policy(kind, **fields))


def the_pool_holds_what_the_plan_says(rank: int) -> None:
    cases = ((0, {"reshard_root": True}), (200, {"mixed_precision": MIXED}), (1 << 20, {}))
    for below, fields in cases:  # bytes of a shard below which it is packed
        bounds = {"nccl": below, "gloo": below}
        with (
            mock.patch.dict(packing.GATHER_BELOW, bounds),
            mock.patch.dict(packing.REDUCE_BELOW, bounds),
            pools_on_cpu() as pools,
        ):
            pooled, plain = module(**fields), module("default", **fields)
            assert all(map(torch.equal, trained(pooled, rank, 2), trained(plain, rank, 2)))
            assert plain.program.collective_memory is None
            (pool,) = pools
            assert pool.peak == pooled.program.collective_memory.bytes > 0
            assert not list(pool._sizes())  # between steps


def it_is_registered_at_the_second_call_of_a_sequence(rank: int) -> None:
    with pools_on_cpu() as pools:
        sharded = module("symmetric")
        (pool,) = pools
        assert pool.symmetric
        trained(sharded, rank, 1)
        assert pool.events == []
        trained(sharded, rank, 2)
        assert pool.events == ["register"]
        sharded.eval()
        with torch.no_grad():
            sharded(*tokens_of(rank, 0))
            assert pool.events == ["register", "deregister"]  # which gathers otherwise
            sharded(*tokens_of(rank, 0))
        sharded.train()
        trained(sharded, rank, 2)
        assert pool.events == ["register", "deregister", "register"]
        group = sharded._graphshard.bindings.group
        release_of(object())
        assert len(pool.events) == 3
        release_of(group.process_group)  # as in front of its end
        assert pool.events[3:] == ["deregister"]
        trained(sharded, rank, 1)
        assert len(pool.events) == 4


def it_is_deregistered_with_the_module(rank: int) -> None:
    with pools_on_cpu() as pools:
        sharded = module()
        trained(sharded, rank, 2)
        del sharded
        gc.collect()
        assert pools[0].events == ["register", "deregister"]


def a_rank_that_cannot_register_keeps_all_from_it(rank: int) -> None:
    with pools_on_cpu(fails=rank == 1) as pools:
        sharded = module()
        found = trained(sharded, rank)
        assert all(map(torch.equal, found, trained(module("default"), rank)))
    assert pools[0].events == ([] if rank == 1 else ["register", "deregister"])
    assert "not registered, since NCCL did not register it on rank 1" in str(sharded.plan)
    assert ("no more handles" in str(sharded.plan)) is (rank == 1)


def pools_that_differ_are_not_registered(rank: int) -> None:
    with pools_on_cpu() as pools:
        sharded = module()
        trained(sharded, rank, 1)
        pools[0].reserved += 512 * rank
        trained(sharded, rank, 1)
    assert pools[0].events == []
    assert "rank 1 has" in sharded.program.collective_memory.why_not


def gloo_has_none(rank: int) -> None:
    for kind in ("nccl", "symmetric"):
        text = error_of(lambda kind=kind: module(kind), PolicyError)
        assert f"collective_memory={kind!r} is impossible" in text
        assert "this module runs on cpu by gloo" in text


def process_groups_cannot_be_replaced(rank: int) -> None:
    with pools_on_cpu():
        sharded = module()
        text = error_of(sharded.rebind, RuntimeStateError)
    assert "registered with the old process groups" in text


CHECKS = [
    the_pool_holds_what_the_plan_says,
    it_is_registered_at_the_second_call_of_a_sequence,
    it_is_deregistered_with_the_module,
    a_rank_that_cannot_register_keeps_all_from_it,
    pools_that_differ_are_not_registered,
    gloo_has_none,
    process_groups_cannot_be_replaced,
]


@pytest.fixture(scope="module")
def checks() -> Checks:
    return Checks(CHECKS, 2, timeout=200.0)


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(checks: Checks, check: Any) -> None:
    checks.require(check)


def test_plan_dump_json_and_estimate_say_the_size(tmp_path):
    plans = {
        kind: graphshard.plan(
            TiedGPT(2), policy(kind), world_size=4, example_inputs=tokens_of(0, 0)
        )
        for kind in ("default", "symmetric")
    }
    plan = plans["symmetric"]
    program = plan.program
    size = program.collective_memory.bytes
    assert f"{size:,} bytes of NCCL's symmetric memory" in str(plan)
    assert f"collective memory: {size:,} bytes" in str(program)
    said = json.loads(json.dumps(plan.to_dict()))["collective_memory"]
    assert said == {"kind": "symmetric", "bytes": size, "not_registered": None}
    assert "collective" not in str(plans["default"])
    # Gradients are copied into the pool before they are sent.
    peaks = {kind: memory_of(p.program, p).peak.bytes for kind, p in plans.items()}
    assert peaks["default"] <= peaks["symmetric"] <= peaks["default"] + size


def test_what_it_contradicts():
    with pytest.raises(PolicyError, match="collective_memory must be one of default, nccl"):
        policy("nvlink")
    with pytest.raises(PolicyError, match="CUDA graphs allocate every buffer"):
        policy("nccl", cuda_graph=True)


def test_one_rank_without_gpus_has_none():
    with pytest.raises(PolicyError, match="this module runs on cpu; leave the field out"):
        graphshard.compile(TiedGPT(1), policy())


@pytest.mark.parametrize(
    ("version", "kind", "expected"),
    [
        ((2, 18, 5), "nccl", "it needs NCCL 2.19, and this torch has 2.18.5"),
        ((2, 26, 2), "symmetric", "it needs NCCL 2.27"),
        ((2, 26, 2), "nccl", ""),
        ((2, 28, 9), "symmetric", ""),
    ],
)
def test_nccl_may_be_too_old(monkeypatch, version, kind, expected):
    backend = mock.Mock(spec=["register_mem_pool", "deregister_mem_pool", "mem_allocator"])
    monkeypatch.setattr(collective_pool, "_nccl_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    said = collective_pool.why_no_pool(kind)
    assert said.startswith(expected)
    assert bool(said) is bool(expected)


def test_torch_may_have_no_such_method(monkeypatch):
    monkeypatch.setattr(collective_pool, "_nccl_backend", lambda: mock.Mock(spec=["mem_allocator"]))
    assert collective_pool.why_no_pool("nccl").endswith("has no ProcessGroupNCCL.register_mem_pool")
