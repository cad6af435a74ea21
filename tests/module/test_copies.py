"""`copy.deepcopy` of a sharded module, as of any module: what averaged weights are made of."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphshard
from graphshard import BlockPolicy, FingerprintError, RuntimeStateError

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.linear(x) * self.slope))


class Model(nn.Module):
    """With tied weights, buffers (one of them in no state dict) and a parameter to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "whole": {"strategy": "NO_SHARD"},
    "zero1": {"strategy": "SHARD_OPTIMIZER"},
    "zero2": {"strategy": "SHARD_GRAD_OP", "recompute": "units"},
    "ignored": {"ignored": "scale"},
    "offload": {"offload": ("params",)},
}


def made(**fields: Any) -> graphshard.ShardedModule:
    torch.manual_seed(0)
    mesh = fields.pop("mesh", None)
    return graphshard.compile(Model(), BlockPolicy({Block}, **fields), mesh=mesh)


def train(sharded: nn.Module, rank: int, steps: int = 2, seed: int = 0) -> list[float]:
    optim = torch.optim.SGD(sharded.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * seed + 10 * step + rank)
        loss = sharded(torch.randint(0, 11, (5,))).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def values(module: nn.Module) -> dict[str, Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in named.items()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def go_their_own_way(rank: int, **fields: Any) -> None:
    """A copy trains as its original would have, to the bit, and neither changes the other."""
    sharded = made(**fields)
    train(sharded, rank)
    before = values(sharded)
    copied = copy.deepcopy(sharded)
    assert same(values(copied), before)
    assert [*copied.state_dict()] == [*sharded.state_dict()]
    assert all(p.grad is None for p in copied.parameters())
    assert copied.head.weight is copied.embed.weight, "what is tied stays tied"
    assert copied.plan.lines() == sharded.plan.lines()
    losses = train(copied, rank, seed=1)
    after = values(copied)
    assert same(values(sharded), before), fields
    assert train(sharded, rank, seed=1) == losses, fields
    assert same(values(sharded), after), fields


def with_every_strategy(rank: int) -> None:
    for fields in OPTIONS.values():
        go_their_own_way(rank, **fields)


def with_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    go_their_own_way(rank, strategy="HYBRID_SHARD", mesh=mesh)
    go_their_own_way(rank, reshard_after_forward=2)


def flags_and_python_state(rank: int) -> None:
    """What was set since compile is in the copy, and what is set on the copy is its own."""
    sharded = made()
    sharded.blocks[1].slope = 0.25
    sharded.blocks[0].eval()
    sharded.blocks[2].linear.weight.requires_grad_(False)
    seen: list[str] = []
    sharded.register_forward_hook(lambda module, args, output: seen.append("hook"))
    holder = SimpleNamespace(model=sharded, watched=[sharded.embed.weight], again=sharded)
    copied = copy.deepcopy(holder)
    assert copied.model is copied.again is not sharded
    assert copied.watched[0] is copied.model.embed.weight
    model = copied.model
    assert isinstance(model, Model)
    assert (model.blocks[1].slope, model.blocks[0].slope) == (0.25, 1.0)
    assert [m.training for m in model.modules()] == [m.training for m in sharded.modules()]
    assert not model.blocks[2].linear.weight.requires_grad
    assert train(model, rank) == train(sharded, rank)
    assert seen == ["hook"] * 4
    model.blocks[1].slope = 2.0
    assert sharded.blocks[1].slope == 0.25
    model.requires_grad_(False)
    assert sharded.embed.weight.requires_grad


class WithHistory(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]
        self.limits = SimpleNamespace(low=[0.0])

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scales[0]


def mutable_python_state(rank: int) -> None:
    """A copy has lists, dicts and objects of its own, wherever they are set, as of any module."""
    sharded = graphshard.compile(WithHistory(), BlockPolicy({Block}))
    sharded.seen = {"steps": [1]}
    sharded.blocks[0].notes = [["a"]]
    sharded.log = sharded.blocks[0].notes
    sharded.dtypes = [torch, torch.float32]  # a module of Python cannot be copied
    holder = SimpleNamespace(limits=sharded.limits, model=sharded, log=sharded.log)
    copied = copy.deepcopy(holder)
    model = copied.model
    assert model.dtypes == sharded.dtypes
    assert copied.limits is model.limits is not sharded.limits
    assert copied.log is model.log is model.blocks[0].notes
    before = sharded(torch.arange(8))
    model.scales[0] = 100.0
    model.seen["steps"].append(2)
    model.limits.low[0] = 1.0
    model.blocks[0].notes[0].append("b")
    assert torch.equal(sharded(torch.arange(8)), before)
    assert not torch.equal(model(torch.arange(8)), before)
    assert (sharded.scales, sharded.seen) == ([1.0], {"steps": [1]})
    assert (sharded.limits.low, sharded.log) == ([0.0], [["a"]])
    assert model.log == [["a", "b"]]


def averaged_weights(rank: int) -> None:
    """torch's averaged model follows a sharded module as it follows the plain one."""
    torch.manual_seed(0)
    plain = Model()
    results = []
    for model in (plain, graphshard.compile(copy.deepcopy(plain), BlockPolicy({Block}))):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(3):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.0 + 0.1 * step)
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            results.append([average(torch.arange(8)), *values(average.module).values()])
    assert all(map(torch.equal, *results))


def one_rank_alone(rank: int) -> None:
    sharded = made()
    if rank == 0:
        message = error_of(lambda: copy.deepcopy(sharded), FingerprintError)
    else:
        message = error_of(lambda: train(sharded, rank), FingerprintError)
    assert "copy.deepcopy() of a sharded module" in message


def without_values(rank: int) -> None:
    with torch.device("meta"):
        model = Model()
    sharded = graphshard.compile(model, BlockPolicy({Block}))
    message = error_of(lambda: copy.deepcopy(sharded), RuntimeStateError)
    assert "has no values yet" in message
    dist.barrier()


test_on_two_ranks = on_ranks(
    [
        flags_and_python_state,
        mutable_python_state,
        averaged_weights,
        without_values,
    ],
    2,
)
test_strategies_on_two_ranks = pytest.mark.slow(on_ranks([with_every_strategy], 2))
test_alone_on_two_ranks = on_ranks([one_rank_alone], 2, group_timeout=8.0)
test_on_four_ranks = pytest.mark.slow(on_ranks([with_replicas], 4))


def test_without_a_process_group() -> None:
    go_their_own_way(0)
    flags_and_python_state(0)
    mutable_python_state(0)
