"""Odd shapes on 3, 5, 6 and 7 ranks: every split trains as one process does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from uneven import batch, compiled, net

from graphshard import MixedPrecision

pytestmark = pytest.mark.slow  # up to seven ranks on two cores

HALF = MixedPrecision(torch.bfloat16, torch.float32)
Step = tuple[float, dict[str, Tensor]]


def by_one_process(rank: int, micro: int = 1) -> list[Step]:
    """The loss of `rank` and the gradients of each step, then the parameters."""
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Step] = []
    for step in range(3):
        grads: list[list[Tensor]] = []
        for other in range(dist.get_world_size()):
            for each in range(micro):
                loss = model(batch(10 * each + step, other))
                loss.backward()
                if other == rank:
                    mine = loss.item()
            grads.append([p.grad for p in model.parameters() if p.requires_grad])
            optim.zero_grad()
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for (_, param), each_rank in zip(trained, zip(*grads, strict=True), strict=True):
            param.grad = sum(each_rank[1:], each_rank[0]) / len(each_rank)
        found.append((mine, {n: p.grad.clone() for n, p in trained}))
        optim.step()
        optim.zero_grad()
    return [*found, (0.0, {n: p.detach().clone() for n, p in model.named_parameters()})]


def by_ranks(sharded: Any, rank: int, micro: int = 1) -> list[Step]:
    optim = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    found: list[Step] = []
    for step in range(3):
        for each in range(micro - 1):
            with sharded.no_sync():
                sharded(batch(10 * each + step, rank)).backward()
        loss = sharded(batch(10 * (micro - 1) + step, rank))
        loss.backward()
        named = [(n, p.grad) for n, p in sharded.named_parameters() if p.grad is not None]
        found.append((loss.item(), {n: full(g).cpu().clone() for n, g in named}))
        optim.step()
        optim.zero_grad()
    return [*found, (0.0, {n: full(p).cpu().clone() for n, p in sharded.named_parameters()})]


def require_equal(found: list[Step], expected: list[Step], *, exact: bool = True) -> None:
    for step, ((loss, ours), (other, theirs)) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        if exact:
            assert loss == other, step
            unequal = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
            assert not unequal, (step, unequal)
        else:
            torch.testing.assert_close(loss, other, rtol=1e-2, atol=1e-3)
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=2e-2, atol=3e-3)


class Variant:
    """A check that a policy of these `fields` trains as one process does.

    In mixed precision it is compared with parameters that are split along dim 0.
    """

    def __init__(self, name: str, *, exact: bool = True, micro: int = 1, **fields: Any) -> None:
        self.__name__, self.exact, self.micro, self.fields = name, exact, micro, fields

    def __call__(self, rank: int) -> None:
        found = by_ranks(compiled(**self.fields), rank, self.micro)
        if precision := self.fields.get("mixed_precision"):
            expected = by_ranks(compiled(along=0, mixed_precision=precision), rank)
        else:
            expected = by_one_process(rank, self.micro)
        require_equal(found, expected, exact=self.exact)


def every_kind_of_split_is_there(rank: int) -> None:
    """Of six ranks, whose grids are 3 x 2 and 2 x 3."""
    sharded = compiled()
    placements = {p.placements for p in sharded.parameters()}
    assert (Shard(0),) in placements
    assert {len(each) for each in placements} == {1, 2}, placements
    # torch's own clipping takes them together, and returns what ours does.
    sharded(batch(0, rank)).backward()
    ours = sharded.clip_grad_norm_(0.1)
    sharded.zero_grad()
    sharded(batch(0, rank)).backward()
    theirs = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
    torch.testing.assert_close(full(theirs), full(ours))
    scaler, optim = torch.amp.GradScaler("cpu"), torch.optim.SGD(sharded.parameters(), lr=0.1)
    before = [full(p).clone() for p in sharded.parameters() if p.requires_grad]
    for infinite in (True, False):
        optim.zero_grad()
        scaler.scale(sharded(batch(0, rank))).backward()
        if infinite and rank == 4:
            local = next(p for p in sharded.parameters() if len(p.placements) == 2).grad
            local.to_local().fill_(torch.inf)
        scaler.step(optim)
        scaler.update()
        after = [full(p) for p in sharded.parameters() if p.requires_grad]
        assert all(map(torch.equal, before, after)) is infinite


def initial_values_do_not_depend_on_the_split(rank: int) -> None:
    values = []
    for along in (0, 1, None):
        sharded = compiled(along, meta=True)
        sharded.init_weights(seed=3)
        values.append({name: full(param).clone() for name, param in sharded.named_parameters()})
    for other in values[1:]:
        assert all(torch.equal(value, values[0][name]) for name, value in other.items())


def grids_are_rebound(rank: int) -> None:
    sharded = compiled()
    grid = next(p for p in sharded.parameters() if len(p.placements) == 2)
    before = [grid.device_mesh.get_group(dim) for dim in (0, 1)]
    whole = full(grid).clone()
    sharded.rebind(DeviceMesh.from_group(dist.new_group(), "cpu"))
    assert all(grid.device_mesh.get_group(dim) is not before[dim] for dim in (0, 1))
    assert torch.equal(full(grid), whole)
    require_equal(by_ranks(sharded, rank), by_one_process(rank))


PLAIN = [
    Variant("chosen"),
    Variant("along_dim_1", along=1),
    Variant("along_dim_2", along=2),
    Variant("shard_grad_op", strategy="SHARD_GRAD_OP"),
    Variant("shard_optimizer", strategy="SHARD_OPTIMIZER"),
    Variant("shard_optimizer_along_dim_1", along=1, strategy="SHARD_OPTIMIZER"),
]
OPTIONS = [
    Variant("overlap", forward_prefetch=1, backward_prefetch="pre"),
    Variant("recompute", recompute="units"),
    Variant("offload", offload=("params", "activations")),
    Variant("accumulate", micro=2),
    Variant("inductor", backend="inductor", exact=False),
    Variant("mixed_precision", mixed_precision=HALF),
    Variant("hybrid", mesh=(2, 3), strategy="HYBRID_SHARD", exact=False),
    Variant("hybrid_zero2", mesh=(2, 3), strategy="HYBRID_SHARD_ZERO2", along=1, exact=False),
    Variant("reshard_to_groups", reshard_after_forward=3),
    every_kind_of_split_is_there,
    initial_values_do_not_depend_on_the_split,
    grids_are_rebound,
]

test_on_three_ranks = on_ranks(PLAIN, 3, timeout=500)
test_on_five_ranks = on_ranks(PLAIN, 5, timeout=500)
test_on_six_ranks = on_ranks([*PLAIN, *OPTIONS], 6, timeout=900)
test_on_seven_ranks = on_ranks(PLAIN, 7, timeout=500)
