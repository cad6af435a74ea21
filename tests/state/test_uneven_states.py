"""Checkpoints of parameters that no rank count divides: from six ranks to two, four and seven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from full_tensors import full
from ranks import run_ranks
from state_checks import assert_same, flat, full_state
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from uneven import batch, compiled, net

pytestmark = pytest.mark.slow  # up to seven ranks on two cores


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def moments(sharded: Any, optim: Any) -> dict[str, Tensor]:
    return flat(sharded.optimizer_state_dict(optim))


def save(rank: int, folder: Path, along: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sharded = compiled(along)
    optim = adamw(sharded)
    sharded(batch(0, rank)).backward()
    optim.step()
    sharded.save_checkpoint(folder / "c", optim)
    sharded.save_safetensors(folder / "x.safetensors")
    dcp.save(sharded.state_dict(), checkpoint_id=folder / "d")
    whole = sharded.full_state_dict(rank0_only=False)
    assert_same(whole, full_state(sharded))
    assert_same({n: t.cpu().clone() for n, t in sharded.iter_full()}, whole)
    with sharded.unsharded():
        inside = {n: p.detach() for n, p in sharded.named_parameters()}
        assert_same(inside, {name: whole[name] for name in inside})
    return whole, moments(sharded, optim)


def load(rank: int, folder: Path, along: Any, expected: Any) -> None:
    weights, states = expected
    sharded = compiled(along)
    optim = adamw(sharded)
    sharded.load_checkpoint(folder / "c", optim)
    assert_same(full_state(sharded), weights)
    assert_same(moments(sharded, optim), states)
    sharded(batch(1, rank)).backward()
    optim.step()
    sharded.load_safetensors(folder / "x.safetensors")
    assert_same(full_state(sharded), weights)
    local = {name: value.clone() for name, value in sharded.local_state_dict().items()}
    sharded.load_full_state_dict(net().state_dict() if rank == 0 else None)
    assert_same(full_state(sharded), dict(net().state_dict()))
    sharded.load_local_state_dict(local)
    assert_same(full_state(sharded), weights)
    fsdp2 = net()
    for block in fsdp2.blocks:
        fully_shard(block)
    fully_shard(fsdp2)
    state = fsdp2.state_dict()
    dcp.load(state, checkpoint_id=folder / "d")
    assert_same({name: full(value) for name, value in state.items()}, weights)
    size = dist.get_world_size()
    dcp.save(state, checkpoint_id=folder / f"fsdp2-{size}")
    back = compiled(along)
    theirs = back.state_dict()
    dcp.load(theirs, checkpoint_id=folder / f"fsdp2-{size}")
    assert_same(full_state(back), weights)


@pytest.mark.parametrize("along", [None, 1], ids=["chosen", "along_dim_1"])
def test_a_checkpoint_goes_to_any_number_of_ranks(tmp_path: Path, along: Any) -> None:
    expected = run_ranks(save, 6, tmp_path, along, timeout=300)[0]
    for ranks in (2, 4, 7):
        run_ranks(load, ranks, tmp_path, along, expected, timeout=300)
