"""Gradient accumulation: kept unsharded, or reduced with each micro-batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from loops import OneProcess, backward, compiled, exact, gpt, same_grads, same_params
from models import Block, ManyOutputs, Odd, features_of, tokens_of
from ranks import checks_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.errors import PassError, RuntimeStateError

MICRO = 3


def ops_of(program: graphshard.Program) -> set[str]:
    return {event.op for event in program.schedule() if event.phase == "backward"}


def micro_batches(rank: int, step: int) -> list[tuple[Tensor, ...]]:
    return [tokens_of(rank, MICRO * step + micro) for micro in range(MICRO)]


@contextlib.contextmanager
def by_attribute(sharded: Any) -> Iterator[None]:
    """The switch that loops for DDP set."""
    sharded.require_backward_grad_sync = False
    assert sharded.require_backward_grad_sync is False
    yield
    sharded.require_backward_grad_sync = True


def kept_is_one_process_s(rank: int) -> None:
    """Two steps of three micro-batches, the last of which reduces."""
    for strategy in ("FULL_SHARD", "NO_SHARD") if exact() else ("FULL_SHARD",):
        model = gpt(1)
        sharded = compiled(model, strategy=strategy)
        optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        reference = OneProcess(
            model, dist.get_world_size(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)
        )
        for step, off in enumerate((sharded.no_sync, lambda each=sharded: by_attribute(each))):
            batches = micro_batches(rank, step)
            with off():
                for batch in batches[:-1]:
                    backward(sharded, rank, *batch)
                    assert all(p.grad is None for p in sharded.parameters())
            backward(sharded, rank, *batches[-1])
            reference.backward(lambda r, step=step: micro_batches(r, step))
            same_grads(sharded, reference.model, exact=exact())
            optim.step()
            sharded.zero_grad()
            reference.step()
        same_params(sharded, reference.model, exact=exact())
        reduce = "all_reduce" if strategy == "NO_SHARD" else "reduce_scatter"
        kinds = [
            ops_of(program) & {"accumulate_grad", "add_accumulated", reduce}
            for program in sharded.programs
        ]
        assert {"accumulate_grad"} in kinds
        assert {"add_accumulated", reduce} in kinds
        assert all(kind in ({"accumulate_grad"}, {"add_accumulated", reduce}) for kind in kinds)


def switches_are_fully_shard_s(rank: int) -> None:
    """Both switches of FSDP2 on a mesh with replicas; then the loop is the same on both."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = gpt(1).eval()
    theirs = fully_shard(copy.deepcopy(model), mesh=mesh)
    policy = graphshard.SizePolicy(10, strategy="HYBRID_SHARD")
    mine = graphshard.compile(model, policy, mesh=mesh)
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        for module in (theirs, mine):
            module.zero_grad()
            for micro in range(3):
                getattr(module, name)(micro == 2)
                module(*tokens_of(rank, micro)).backward()
        for param, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), full(other.grad))
    mine.set_requires_gradient_sync(False)
    mine.set_requires_all_reduce(False)  # of what is not reduced at all
    mine.zero_grad()
    mine(*tokens_of(rank, 0)).backward()
    assert all(param.grad is None for param in mine.parameters())


def reduced_each_time(rank: int) -> None:
    """The default adds reduced shards; mixing both ways adds up all the same."""
    model = gpt(1)
    reference = OneProcess(model, dist.get_world_size())
    reference.backward(lambda r: micro_batches(r, 0))
    first, second, third = micro_batches(rank, 0)
    sharded = compiled(model)
    for batch in (first, second, third):
        backward(sharded, rank, *batch)
    same_grads(sharded, reference.model, exact=False)
    assert len(sharded.programs) == 1
    sharded.zero_grad()
    backward(sharded, rank, *first)
    with sharded.no_sync():
        backward(sharded, rank, *second)
    backward(sharded, rank, *third)
    same_grads(sharded, reference.model, exact=False)


def only_all_reduce_put_off(rank: int) -> None:
    """Four ranks as 2 x 2, as one process; as `fully_shard` they do on two ranks, above."""
    model = gpt(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = OneProcess(model, 4)
    reference.backward(lambda r: micro_batches(r, 0))
    sharded = graphshard.compile(
        model, graphshard.BlockPolicy({Block}, strategy="HYBRID_SHARD"), mesh=mesh
    )
    batches = micro_batches(rank, 0)
    with sharded.no_sync(all_reduce_only=True):
        for batch in batches[:-1]:
            backward(sharded, rank, *batch)
    backward(sharded, rank, *batches[-1])
    same_grads(sharded, reference.model, exact=False)
    keep, add = sharded.programs
    assert ops_of(keep) & {
        "accumulate_grad",
        "add_accumulated",
        "reduce_scatter",
        "all_reduce",
    } == {
        "accumulate_grad",
        "reduce_scatter",
    }
    assert ops_of(add) >= {"add_accumulated", "reduce_scatter", "all_reduce"}
    assert "bytes of shards of gradients" in str(keep)
    sharded.zero_grad()
    first, second, third = batches
    with sharded.no_sync():  # first whole gradients, then shards
        backward(sharded, rank, *first)
    with sharded.no_sync(all_reduce_only=True):
        backward(sharded, rank, *second)
    backward(sharded, rank, *third)
    same_grads(sharded, reference.model, exact=False)


def odd_parameters_on_replicas(rank: int) -> None:
    """Replicated parameters are reduced each time, whatever is put off."""
    torch.manual_seed(0)
    model = Odd()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = graphshard.compile(
        model, graphshard.BlockPolicy({Block}, strategy="HYBRID_SHARD_ZERO2"), mesh=mesh
    )
    reference = OneProcess(model, 4)
    reference.backward(lambda r: [features_of(r, s, 16) for s in range(2)])
    with sharded.no_sync(all_reduce_only=True):
        backward(sharded, rank, *features_of(rank, 0, 16))
    backward(sharded, rank, *features_of(rank, 1, 16))
    same_grads(sharded, reference.model, exact=False)
    norm = sharded.clip_grad_norm_(1e6)
    theirs = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 1e6)
    torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0)
    flat = compiled(model)
    with flat.no_sync(all_reduce_only=True), pytest.raises(PassError, match="over replicas"):
        flat(*features_of(rank, 0, 16))


class Heads(nn.Module):
    """Uses one head or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block(dropout=0.0)
        self.left = nn.Linear(16, 5)
        self.right = nn.Linear(16, 5)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(self.trunk(x)).pow(2).mean()


def other_parameters(rank: int) -> None:
    """What an earlier micro-batch kept is reduced although the last does not use it."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        torch.manual_seed(0)
        model = Heads()
        sharded = graphshard.compile(
            model, graphshard.BlockPolicy({Block, "Linear"}, strategy=strategy), check=True
        )
        reference = OneProcess(model, dist.get_world_size())
        reference.backward(lambda r: [(*features_of(r, s, 16), s == 0) for s in range(2)])
        with sharded.no_sync():
            backward(sharded, rank, *features_of(rank, 0, 16), True)
        backward(sharded, rank, *features_of(rank, 1, 16), False)
        same_grads(sharded, reference.model, exact=exact())
        backward(sharded, rank, *features_of(rank, 1, 16), False)  # nothing is kept any more
        assert "add_accumulated" not in ops_of(sharded.program)
        assert not sharded._graphshard.bindings.accumulated.tensors


def partial_backwards(rank: int) -> None:
    """Outputs that get no gradient: nothing is kept for them, what was kept is reduced."""
    torch.manual_seed(0)
    model = ManyOutputs()
    world = dist.get_world_size()
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        sharded = graphshard.compile(
            model, graphshard.BlockPolicy({nn.Linear}, strategy=strategy), check=True
        )
        replicas = [copy.deepcopy(model) for _ in range(world)]
        for r, replica in enumerate(replicas):
            replica(*features_of(r, 0, 6))["loss"].backward()
            replica(*features_of(r, 1, 6))["pair"][1].sum().backward()
        with sharded.no_sync():
            sharded(*features_of(rank, 0, 6))["loss"].backward()
        assert {name for _, name in sharded._graphshard.bindings.accumulated.tensors} == {
            "trunk.weight",
            "trunk.bias",
            "left.weight",
            "left.bias",
        }
        sharded(*features_of(rank, 1, 6))["pair"][1].sum().backward()
        for name, param in sharded.named_parameters():
            each = [dict(r.named_parameters())[name].grad for r in replicas]
            expected = sum(each[1:], each[0]) / world
            torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-7)


def forwards_before_backwards(rank: int) -> None:
    model = gpt(1)
    sharded = compiled(model)
    reference = OneProcess(model, dist.get_world_size())
    reference.backward(lambda r: micro_batches(r, 0))
    batches = micro_batches(rank, 0)

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        torch.manual_seed(rank)
        return sharded(*batch)

    with sharded.no_sync():
        losses = [loss(batch) for batch in batches[:2]]
        for each in losses:
            each.backward()
    last = loss(batches[2])
    last.backward()
    same_grads(sharded, reference.model, exact=exact())
    sharded.zero_grad()

    with sharded.no_sync():
        late = loss(batches[0])
    now = loss(batches[1])
    with pytest.raises(RuntimeStateError, match="would miss the reduce"):
        now.backward()
    now = loss(batches[1])
    late.backward()  # in this order it counts
    now.backward()
    now = loss(batches[2])
    now.backward()
    same_grads(sharded, reference.model, exact=False)
    sharded.zero_grad()

    with sharded.no_sync():
        dropped = loss(batches[0])
    del dropped
    for batch in batches:
        loss(batch).backward()
    same_grads(sharded, reference.model, exact=False)


def dropped_and_refused(rank: int) -> None:
    sharded = compiled(gpt(1))
    with sharded.no_sync():
        backward(sharded, rank, *tokens_of(rank, 0))
    with pytest.raises(RuntimeStateError, match=r"is accumulated by no_sync\(\) and not"):
        sharded.clip_grad_norm_(1.0)
    sharded.zero_grad()
    backward(sharded, rank, *tokens_of(rank, 1))
    (_, program) = sharded.programs
    assert "add_accumulated" not in ops_of(program)
    fresh = compiled(gpt(1))
    backward(fresh, rank, *tokens_of(rank, 1))
    for ours, theirs in zip(sharded.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))


def ranks_must_agree(rank: int) -> None:
    sharded = compiled(gpt(1))
    syncing = sharded.no_sync() if rank == 0 else contextlib.nullcontext()
    with syncing, pytest.raises(graphshard.FingerprintError, match="different collectives"):
        sharded(*tokens_of(rank, 0))


ONLY_ON_FOUR = [only_all_reduce_put_off, odd_parameters_on_replicas]

test_on_two_ranks = on_ranks(checks_of(globals(), but=ONLY_ON_FOUR), 2, timeout=400)
test_on_four_ranks = pytest.mark.slow(
    on_ranks([kept_is_one_process_s, *ONLY_ON_FOUR], 4, timeout=400)
)
