"""State of parameters on two mesh dimensions, split along another dim, or copied, on 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from models import features_of
from ranks import on_ranks
from state_checks import assert_same, full_state, on_meta, seeded, shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import graphshard


class Wide(nn.Module):
    """On 4 ranks: 5 rows are padded along dim 0, or 8 columns split; 8 rows are split evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(8, 5)
        self.many = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.many(self.few(x).tanh()).pow(2).mean()


def policy(**fields: Any) -> graphshard.BlockPolicy:
    return graphshard.BlockPolicy({nn.Linear}, **fields)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def step(module: nn.Module, optim: torch.optim.Optimizer) -> None:
    module(*features_of(dist.get_rank(), 0, 8)).backward()
    optim.step()
    optim.zero_grad()


def moments(module: graphshard.ShardedModule, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = module.optimizer_state_dict(optim)["state"]
    return {f"{n}/{k}": full(v).clone() for n, e in state.items() for k, v in e.items()}


def survives(make: Callable[[], graphshard.ShardedModule], sharded: Any) -> None:
    """Everything `sharded` and its optimizer have goes out each way, and into `make()`."""
    optim = adamw(sharded)
    step(sharded, optim)
    expected, wanted = full_state(sharded), moments(sharded, optim)
    folder = shared_folder()
    sharded.save_checkpoint(folder / "c", optim)
    sharded.save_safetensors(folder / "x.safetensors")
    whole = sharded.full_state_dict()
    state = sharded.optimizer_state_dict(optim, kind="full")
    dist.barrier()
    loads: list[Callable[[Any, Any], Any]] = [
        lambda m, o: m.load_checkpoint(folder / "c", o),
        lambda m, o: (
            m.load_safetensors(folder / "x.safetensors"),
            m.load_optimizer_state_dict(o, state),
        ),
        lambda m, o: (
            m.load_safetensors(folder / "x.safetensors", read="first"),
            m.load_checkpoint(folder / "c", o),
        ),
        lambda m, o: (m.load_full_state_dict(whole), m.load_optimizer_state_dict(o, state)),
    ]
    for load in loads:
        again = make()
        other = adamw(again)
        load(again, other)
        assert_same(full_state(again), expected)
        assert_same(moments(again, other), wanted)
    step(again, other)
    local = {name: value.clone() for name, value in sharded.local_state_dict().items()}
    mine = sharded.optimizer_state_dict(optim, kind="local")
    with torch.no_grad():
        for param in sharded.parameters():
            param.zero_()
    sharded.load_local_state_dict(local)
    assert_same(full_state(sharded), expected)
    sharded.load_optimizer_state_dict(optim, mine, kind="local")
    assert_same(moments(sharded, optim), wanted)


def other_dims(rank: int) -> None:
    placed = graphshard.ModulePolicy(
        {"few": {"placement": {"weight": 1, "bias": "replicate"}}}, base=policy()
    )

    def make() -> graphshard.ShardedModule:
        return graphshard.compile(on_meta(Wide), placed)

    sharded = graphshard.compile(seeded(Wide), placed)
    weight = sharded.get_parameter("few.weight")
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(1),)
    survives(make, sharded)


def two_mesh_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = policy(strategy="HYBRID_SHARD")
    sharded = graphshard.compile(seeded(Wide), hybrid, mesh=mesh)
    survives(lambda: graphshard.compile(on_meta(Wide), hybrid, mesh=mesh), sharded)


def from_two_dimensions_to_one(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = policy(strategy="HYBRID_SHARD")
    sharded = graphshard.compile(seeded(Wide), hybrid, mesh=mesh)
    survives(lambda: graphshard.compile(on_meta(Wide), policy(strategy="NO_SHARD")), sharded)


ON_FOUR = [other_dims, two_mesh_dimensions, from_two_dimensions_to_one]

test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=300))
