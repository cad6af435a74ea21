"""Checks of where parameters lie and in which form, to be run on ranks (see `ranks.Checks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import graphshard
from graphshard.program import packing

History = list[tuple[Tensor, dict[str, Tensor]]]


class Experts(nn.Module):
    """Two stacked experts of 64 KiB each, which no group above two ranks divides along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(128, 2)
        self.w = nn.Parameter(torch.randn(2, 128, 128) / 12)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w, std=1 / 12)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("bi,eij->bej", x, self.w)
        return x + (F.softmax(self.gate(x), -1).unsqueeze(-1) * each).sum(1)


class MoE(nn.Module):
    """An embedding of odd rows, blocks, a tied head and a frozen scale."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 128)
        self.blocks = nn.ModuleList(Experts() for _ in range(blocks))
        self.norm = nn.LayerNorm(128)
        self.norm.weight.requires_grad_(False)
        self.head = nn.Linear(128, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)), targets)


def model(blocks: int = 2) -> MoE:
    torch.manual_seed(3)
    return MoE(blocks)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(19, (2, 6), generator=generator)
    return ids[0], ids[1]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters()
    return {name: full(p.grad).detach().clone() for name, p in named if p.grad is not None}


def trained(
    module: nn.Module, rank: int, optimizer: Callable[..., Any] = torch.optim.AdamW, steps: int = 3
) -> History:
    """(loss, full gradients) of each step, and the parameters at the end."""
    optim = optimizer([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    history: History = []
    for step in range(steps):
        loss = module(*batch(rank, step))
        loss.backward()
        history.append((loss.detach().clone(), grads_of(module)))
        optim.step()
        optim.zero_grad()
    ends = {n: full(p).detach().clone() for n, p in module.named_parameters()}
    history.append((torch.zeros(()), ends))
    return history


def trained_alone(rank: int, steps: int = 3) -> History:
    """The same by one process that computes every rank's batch."""
    size = dist.get_world_size()
    alone = model()
    optim = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=1e-2)
    history: History = []
    for step in range(steps):
        own = torch.zeros(())
        total: dict[str, Tensor] = {}
        for other in range(size):
            loss = alone(*batch(other, step))
            loss.backward()
            own = loss.detach() if other == rank else own
            for name, grad in grads_of(alone).items():
                total[name] = total[name] + grad if name in total else grad
            optim.zero_grad()
        for name, param in alone.named_parameters():
            if name in total:
                param.grad = total[name] / size
        history.append((own, {name: grad / size for name, grad in total.items()}))
        optim.step()
        optim.zero_grad()
    ends = {n: p.detach().clone() for n, p in alone.named_parameters()}
    history.append((torch.zeros(()), ends))
    return history


def assert_same(got: History, expected: History, *, exact: bool) -> None:
    for (loss, grads), (their_loss, their_grads) in zip(got, expected, strict=True):
        assert grads.keys() == their_grads.keys(), grads.keys() ^ their_grads.keys()
        pairs = [(loss, their_loss), *((grads[n], their_grads[n]) for n in grads)]
        for mine, theirs in pairs:
            if exact:
                assert torch.equal(mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def by_fully_shard(rank: int, dim: Callable[[nn.Parameter], Shard | None] | None = None) -> History:
    reference = model()
    for block in reference.blocks:
        fully_shard(block, shard_placement_fn=dim)
    fully_shard(reference, shard_placement_fn=dim)
    return trained(reference, rank)


def compiled(
    modules: Mapping[Any, Any], rank: int, base: graphshard.Policy | None = None, **fields: Any
) -> graphshard.ShardedModule:
    base = graphshard.BlockPolicy({Experts}) if base is None else base
    policy = graphshard.ModulePolicy(modules, base, **fields)
    return graphshard.compile(model(), policy, example_inputs=batch(rank, 0), check=True)


def exact() -> bool:
    """On two ranks a sum has one order only."""
    return dist.get_world_size() == 2


# -- other dims --------------------------------------------------------------------------------


def along_dim(value: nn.Parameter) -> Shard | None:
    return Shard(1) if value.ndim == 3 else None


def experts_are_split_along_another_dim(rank: int) -> None:
    sharded = compiled({Experts: {"placement": {"w": 1}}}, rank)
    w = sharded.get_parameter("blocks.0.w")
    size = dist.get_world_size()
    assert w.placements == (Shard(1),)
    assert w.to_local().shape == (2, 128 // size, 128)
    assert torch.equal(full(w), model().blocks[0].w)
    got = trained(sharded, rank)
    assert_same(got, by_fully_shard(rank, along_dim), exact=exact())
    assert_same(got, trained_alone(rank), exact=exact())


def the_last_dim_and_copies_train_alike(rank: int) -> None:
    sharded = compiled(
        {Experts: {"placement": {"w": 2, "gate.weight": 1, "gate.bias": "replicate"}}}, rank
    )
    gate = sharded.get_submodule("blocks.1.gate")
    assert gate.weight.placements == (Shard(1),)
    assert not gate.bias.placements[0].is_shard()
    assert_same(trained(sharded, rank), trained_alone(rank), exact=exact())


def packing_changes_nothing(rank: int) -> None:
    modules = {Experts: {"placement": {"w": 2, "gate.weight": 1}}}
    expected = trained(compiled(modules, rank), rank, steps=1)
    for gather, reduce in ((1 << 20, 0), (0, 1 << 10)):
        with (
            mock.patch.dict(packing.GATHER_BELOW, gloo=gather),
            mock.patch.dict(packing.REDUCE_BELOW, gloo=reduce),
        ):
            assert_same(trained(compiled(modules, rank), rank, steps=1), expected, exact=True)


def padding_is_avoided_by_itself(rank: int) -> None:
    sharded = compiled({}, rank)
    by_itself = 0 if dist.get_world_size() == 2 else 1
    assert sharded.plan.layouts["blocks.0.w"].dim == by_itself
    assert_same(trained(sharded, rank), trained_alone(rank), exact=exact())


def state_of_other_dims_goes_out_and_in(rank: int) -> None:
    sharded = compiled({Experts: {"placement": {"w": 2}}}, rank)
    trained(sharded, rank, steps=1)
    state = {name: full(value) for name, value in sharded.state_dict().items()}
    again = compiled({Experts: {"placement": {"w": 1}}}, rank)
    again.load_full_state_dict(state if rank == 0 else None)
    for name, value in again.state_dict().items():
        assert torch.equal(full(value), state[name]), name
    once_more = compiled({}, rank)
    once_more.load_state_dict(state)
    for name, value in once_more.state_dict().items():
        assert torch.equal(full(value), state[name]), name


# -- module policy -----------------------------------------------------------------------------


def units_of_their_own_kind_train_alike(rank: int) -> None:
    expected = trained_alone(rank)
    for modules in (
        {"blocks.1": {"reshard_after_forward": False}, "embed": {}},
        {"blocks.1": {"strategy": "NO_SHARD"}, "": {"reshard_after_forward": True}},
        {Experts: {"strategy": "SHARD_GRAD_OP"}, "blocks.0": {"strategy": "FULL_SHARD"}},
    ):
        assert_same(trained(compiled(modules, rank), rank), expected, exact=exact())


LAYOUT = [
    experts_are_split_along_another_dim,
    the_last_dim_and_copies_train_alike,
    packing_changes_nothing,
    padding_is_avoided_by_itself,
    state_of_other_dims_goes_out_and_in,
    units_of_their_own_kind_train_alike,
]
