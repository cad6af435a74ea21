"""Checks of where parameters lie and in which form, to be run on ranks (see `ranks.Checks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import graphshard
from graphshard import ops, torch_compat
from graphshard.errors import RuntimeStateError
from graphshard.runtime import group as group_module

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
            mock.patch.dict(group_module._PACK_GATHER_BELOW, gloo=gather),
            mock.patch.dict(group_module._PACK_REDUCE_BELOW, gloo=reduce),
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


# -- optimizer states sharded only -----------------------------------------------------------------


def zero1(rank: int, modules: Mapping[Any, Any] | None = None) -> graphshard.ShardedModule:
    return compiled(modules or {}, rank, strategy="SHARD_OPTIMIZER")


def gathers(program: graphshard.Program) -> list[Any]:
    return [node for node in program.nodes() if node.target is ops.all_gather]


def loss_of(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    with torch.no_grad():
        return module(*batch(rank, step))


def loss_of_full(sharded: nn.Module, rank: int) -> Tensor:
    """The loss of the plain model with the parameters the ranks have."""
    alone = model()
    state = {name: full(param).detach() for name, param in sharded.named_parameters()}
    alone.load_state_dict(state, strict=False)
    return loss_of(alone, rank)


def zero1_trains_as_one_process_and_fully_shard_do(rank: int) -> None:
    got = trained(zero1(rank), rank)
    assert_same(got, trained_alone(rank), exact=exact())
    assert_same(got, by_fully_shard(rank), exact=exact())
    assert_same(got, trained(compiled({}, rank, strategy="NO_SHARD"), rank), exact=exact())


def zero1_goes_with_every_kind_of_optimizer(rank: int) -> None:
    for optimizer in (
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, foreach=False),
        partial(torch.optim.SGD, momentum=0.9, foreach=True),
    ):
        expected = trained(compiled({}, rank, strategy="NO_SHARD"), rank, optimizer)
        assert_same(trained(zero1(rank), rank, optimizer), expected, exact=exact())


def zero1_gathers_only_what_has_changed(rank: int) -> None:
    sharded = zero1(rank)
    trained(sharded, rank, steps=3)
    assert len(sharded.programs) == 2
    for program, frozen_too in zip(sharded.programs, (True, False), strict=True):
        found = gathers(program)
        assert [node.kwargs["unit"] for node in found] == ["", "blocks.0", "blocks.1"]
        assert all(node.kwargs["in_place"] for node in found)
        assert ("norm.weight" in found[0].kwargs["params"]) == frozen_too
        kinds = [event.op for event in program.schedule()]
        assert kinds.count("reduce_scatter") == 3
        assert "free" not in kinds
    for step in range(3):
        loss_of(sharded, rank, step)
    assert [len(gathers(program)) for program in sharded.programs] == [3, 3, 3, 0]
    assert torch.equal(loss_of(sharded, rank), loss_of_full(sharded, rank))


def zero1_accumulates_without_gathering_again(rank: int) -> None:
    sharded, expected = zero1(rank), model()
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, expected)]
    size = dist.get_world_size()
    for step in range(2):
        for micro in range(2):
            sharded(*batch(rank, 2 * step + micro)).backward()
            for other in range(size):
                (expected(*batch(other, 2 * step + micro)) / size).backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for name, param in sharded.named_parameters():
        torch.testing.assert_close(full(param), expected.get_parameter(name))
    assert [len(gathers(program)) for program in sharded.programs] == [3, 0, 3]


def zero1_stores_what_the_plan_says(rank: int) -> None:
    sharded = zero1(rank)
    storages = {}
    for param in sharded.parameters():
        storage = param.to_local().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    assert sum(storages.values()) == sum(unit.sharded_bytes for unit in sharded.plan.units)
    loss_of(sharded, rank)
    trained(sharded, rank, steps=1)
    assert {p.to_local().untyped_storage().data_ptr() for p in sharded.parameters()} == set(
        storages
    )


def zero1_sees_every_way_a_parameter_is_written(rank: int) -> None:
    sharded = zero1(rank)
    weight = sharded.get_parameter("embed.weight")
    torch.manual_seed(rank)

    def in_place() -> None:
        weight.mul_(1.5)

    def by_local_part() -> None:
        weight.to_local().mul_(1.5)

    def into_a_state_dict() -> None:
        state = sharded.state_dict()
        loss_of(sharded, rank)
        state["embed.weight"].to_local().mul_(1.5)  # as checkpoints are read

    def by_loading() -> None:
        sharded.load_state_dict({n: full(p) * 1.5 for n, p in sharded.state_dict().items()})

    def by_loading_in_full() -> None:
        sharded.load_full_state_dict({n: full(p) * 1.5 for n, p in sharded.state_dict().items()})

    def by_assigning() -> None:
        state = {n: p * 1.5 for n, p in sharded.state_dict().items()}
        sharded.load_state_dict(state, assign=True)

    def by_local_tensor() -> None:
        torch_compat.set_local_tensor(weight, weight.to_local().clone() * 1.5)

    def with_all_of_it() -> None:
        with sharded.unsharded(writeback=True) as params:
            params["embed.weight"].mul_(1.5)

    before = loss_of(sharded, rank)
    for write in (
        *(in_place, by_local_part, into_a_state_dict, by_loading, by_loading_in_full),
        *(by_local_tensor, with_all_of_it, by_assigning),
    ):
        with torch.no_grad():
            write()
        after = loss_of(sharded, rank)
        assert not torch.equal(after, before), write.__name__
        assert torch.equal(after, loss_of_full(sharded, rank)), write.__name__
        before = after


def a_step_before_backward_is_refused(rank: int) -> None:
    for strategy in ("SHARD_OPTIMIZER", "FULL_SHARD"):
        sharded = compiled({}, rank, strategy=strategy)
        optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for _ in range(2):
            sharded(*batch(rank, 0)).backward()
            loss = sharded(*batch(rank, 1))
            optim.step()
            with pytest.raises(RuntimeStateError, match="changed between a forward and its"):
                loss.backward()
            optim.zero_grad()


def zero1_units_live_beside_others(rank: int) -> None:
    modules = {"blocks.1": {"strategy": "FULL_SHARD"}, "": {"strategy": "SHARD_GRAD_OP"}}
    got = trained(zero1(rank, modules), rank)
    assert_same(got, trained_alone(rank), exact=exact())


def zero1_starts_from_meta(rank: int) -> None:
    with torch.device("meta"):
        made = MoE()
    policy = graphshard.BlockPolicy({Experts}, strategy="SHARD_OPTIMIZER")
    sharded = graphshard.compile(made, policy, check=True)
    sharded.init_weights(seed=1)
    assert torch.equal(loss_of(sharded, rank), loss_of_full(sharded, rank))
    for param in sharded.parameters():
        assert not full(param).isnan().any()


def zero1_ranks_that_came_with_other_weights_agree(rank: int) -> None:
    torch.manual_seed(rank)
    policy = graphshard.BlockPolicy({Experts}, strategy="SHARD_OPTIMIZER")
    sharded = graphshard.compile(MoE(), policy, check=True)
    assert torch.equal(loss_of(sharded, rank), loss_of_full(sharded, rank))


ZERO1 = [
    zero1_trains_as_one_process_and_fully_shard_do,
    zero1_goes_with_every_kind_of_optimizer,
    zero1_gathers_only_what_has_changed,
    zero1_accumulates_without_gathering_again,
    zero1_stores_what_the_plan_says,
    zero1_sees_every_way_a_parameter_is_written,
    a_step_before_backward_is_refused,
    zero1_units_live_beside_others,
    zero1_starts_from_meta,
    zero1_ranks_that_came_with_other_weights_agree,
]

LAYOUT = [
    experts_are_split_along_another_dim,
    the_last_dim_and_copies_train_alike,
    packing_changes_nothing,
    padding_is_avoided_by_itself,
    state_of_other_dims_goes_out_and_in,
    units_of_their_own_kind_train_alike,
]


# What differs in kind on four ranks: ranks without rows, copies, sums in more than one order.
ON_FOUR_RANKS = [
    experts_are_split_along_another_dim,
    padding_is_avoided_by_itself,
    units_of_their_own_kind_train_alike,
    zero1_trains_as_one_process_and_fully_shard_do,
    zero1_gathers_only_what_has_changed,
    zero1_accumulates_without_gathering_again,
]
