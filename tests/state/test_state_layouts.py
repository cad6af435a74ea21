"""State under each layout, of complex parameters too: out, into a model from meta, and on.

What is saved is a copy, in the background too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_grads
from models import features_of
from ranks import on_ranks
from state_checks import assert_same, flat, full_state, on_meta, seeded, shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.policy.strategy import Strategy


class Wide(nn.Module):
    """On 4 ranks: 5 rows are padded along dim 0, or 8 columns split; 8 rows are split evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(8, 5)
        self.many = nn.Linear(5, 8)
        self.turns = nn.Parameter(torch.randn(5, 5, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.tensor(0.6 + 0.8j))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.few(x).tanh().cfloat() @ self.turns * self.scale
        return self.many(turned.real + turned.imag).pow(2).mean()


def policy(**fields: Any) -> graphshard.BlockPolicy:
    return graphshard.BlockPolicy({nn.Linear}, **fields)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # One by one: ignored parameters are plain tensors, the others are not.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)


def step(module: nn.Module, optim: torch.optim.Optimizer) -> None:
    # One batch for all ranks, since nobody reduces the gradients of ignored parameters.
    module(*features_of(0, 0, 8)).backward()
    optim.step()
    optim.zero_grad()


def moments(module: graphshard.ShardedModule, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    return flat(module.optimizer_state_dict(optim))


def mesh_of(shape: tuple[int, int] | None) -> DeviceMesh | None:
    return shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def survives(sharded: Any, make: Callable[[], graphshard.ShardedModule]) -> None:
    """All that `sharded` and its optimizer have goes out each way, into `make()`, and trains on."""
    optim = adamw(sharded)
    step(sharded, optim)
    expected, wanted = full_state(sharded), moments(sharded, optim)
    folder = shared_folder()
    sharded.save_checkpoint(folder / "c", optim)
    sharded.save_safetensors(folder / "x.safetensors")
    whole = sharded.full_state_dict()
    state = sharded.optimizer_state_dict(optim, kind="full")
    local = {name: value.clone() for name, value in sharded.local_state_dict().items()}
    mine = copy.deepcopy(sharded.optimizer_state_dict(optim, kind="local"))
    dist.barrier()
    step(sharded, optim)
    after = full_state(sharded)
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
        assert_same(full_state(again), after)
    sharded.load_local_state_dict(local)
    assert_same(full_state(sharded), expected)
    sharded.load_optimizer_state_dict(optim, mine, kind="local")
    assert_same(moments(sharded, optim), wanted)


class Survives:
    """A check of a policy on a mesh, and of another policy that takes the state."""

    def __init__(self, name: str, own: Any, mesh: Any = None, into: Any = None) -> None:
        self.__name__, self.own, self.mesh, self.into = name, own, mesh, into

    def __call__(self, rank: int) -> None:
        mesh = mesh_of(self.mesh)
        sharded = graphshard.compile(seeded(Wide), self.own, mesh=mesh)
        into, where = (self.into, None) if self.into else (self.own, mesh)
        survives(sharded, lambda: graphshard.compile(on_meta(Wide), into, mesh=where))


PLACED = graphshard.ModulePolicy(
    {"few": {"placement": {"weight": 1, "bias": "replicate"}}}, base=policy()
)
HYBRID = policy(strategy="HYBRID_SHARD")
WHOLE = policy(strategy="NO_SHARD")
ON_FOUR = [
    Survives("another dim", PLACED),
    Survives("two mesh dimensions", HYBRID, (2, 2)),
    Survives("from two dimensions to one", HYBRID, (2, 2), into=WHOLE),
    Survives("whole", WHOLE),
    Survives("zero1", policy(strategy="SHARD_OPTIMIZER")),
    Survives("ignored parameters", policy(ignored=[r"few\..*"])),
]

# -- what is saved is a copy ----------------------------------------------------------------------


def in_the_background(rank: int) -> None:
    """A save in the background has the values of its call, under every strategy."""
    shapes = {Strategy.HYBRID_SHARD: (1, 2), Strategy.HYBRID_SHARD_ZERO2: (2, 1)}
    for strategy in Strategy:
        mesh = mesh_of(shapes.get(strategy))
        # On the host once where each rank has a part, and once where all have all rows.
        on_host = strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD_ZERO2)
        for offload in (None, "params") if on_host else (None,):
            own = policy(strategy=strategy, offload=offload)
            sharded = graphshard.compile(seeded(Wide), own, mesh=mesh)
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
    for shape, strategy in (((2, 1), "HYBRID_SHARD"), ((1, 2), "HYBRID_SHARD"), (None, "NO_SHARD")):
        mesh = mesh_of(shape)
        sharded = graphshard.compile(seeded(Wide), policy(strategy=strategy), mesh=mesh)
        optim = adamw(sharded)
        step(sharded, optim)
        state = sharded.optimizer_state_dict(optim, kind="full", rank0_only=False)["state"]
        saved = {f"{n}.{k}": value for n, entries in state.items() for k, value in entries.items()}
        saved |= sharded.full_state_dict(rank0_only=False)
        before = {name: value.clone() for name, value in saved.items()}
        step(sharded, optim)
        assert_same(saved, before)


def gradients_seen_without_writeback_are_copies(rank: int) -> None:
    mesh = mesh_of((2, 1))
    for options in ({"strategy": "HYBRID_SHARD", "mesh": mesh}, {"strategy": "NO_SHARD"}):
        own = policy(strategy=options.pop("strategy"))
        sharded = graphshard.compile(seeded(Wide), own, **options)
        sharded(*features_of(0, 0, 8)).backward()
        before = full_grads(sharded)
        with sharded.unsharded(with_grads=True, writeback=False) as params:
            for param in set(params.values()):
                param.grad.zero_()
        assert_same(full_grads(sharded), before)


test_on_two_ranks = on_ranks([in_the_background], 2)
test_more_on_two_ranks = pytest.mark.slow(
    on_ranks([what_is_saved_is_a_copy, gradients_seen_without_writeback_are_copies], 2)
)
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=300))
