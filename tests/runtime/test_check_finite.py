"""NaN and infinity on ranks: where a checked step says that they began."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import checks_of, error_of, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import graphshard
from graphshard import BlockPolicy, MixedPrecision, NonFiniteError, NonFiniteWarning

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 33)
        self.down = nn.Linear(33, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden + torch.log1p(shift)
        return x + self.down(F.gelu(hidden))


class Model(nn.Module):
    """NaN in the block at which `shifts` is below -1; an infinite gradient where `slopes` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, shifts: Tensor) -> Tensor:
        x = self.first(x)
        for block, shift in zip(self.blocks, shifts, strict=True):
            x = block(x, shift)
        return self.head(self.drop(self.norm(x))).pow(2).mean()


SHIFTS = (0.0, 0.5, 0.25)
BAD = (0.0, -2.0, 0.25)


def sharded_of(check_finite: str | None = "error", **fields: Any) -> graphshard.ShardedModule:
    backend = fields.pop("backend", "eager")
    torch.manual_seed(0)
    policy = BlockPolicy({Block}, check_finite=check_finite, **fields)
    return graphshard.compile(Model(), policy, backend=backend)


def batch_of(rank: int, shifts: tuple[float, ...] = SHIFTS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    return torch.randn(8, WIDTH), torch.tensor(shifts)


def step(sharded: graphshard.ShardedModule, rank: int, shifts: tuple[float, ...] = SHIFTS) -> None:
    inputs = batch_of(rank, shifts)
    sharded(*inputs).backward()


def grads_of(sharded: graphshard.ShardedModule) -> list[Tensor]:
    return [p.grad.full_tensor() for p in sharded.parameters()]  # type: ignore[union-attr,misc]


def one_rank_fails_all(rank: int) -> None:
    """The error names unit, rank, operator and line, and is the same on both ranks."""
    sharded = sharded_of()
    step(sharded, rank)
    before = grads_of(sharded)
    with pytest.raises(NonFiniteError) as caught:
        step(sharded, rank, BAD if rank == 1 else SHIFTS)
    error = caught.value
    assert (error.unit, error.phase, error.ranks) == ("blocks.1", "forward", (1,))
    assert "on rank 1 of 2" in str(error)
    assert "hidden = hidden + torch.log1p(shift)" in str(error)
    assert "aten.log1p" in str(error)
    assert "NaN in 1 of 1 elements from finite operands" in str(error)
    assert all(map(torch.equal, grads_of(sharded), before)), "nothing was added to .grad"
    message = error_of(lambda: step(sharded, rank, BAD if rank == 1 else SHIFTS), NonFiniteError)
    assert message == str(error)
    step(sharded, rank)
    with torch.no_grad():
        message = error_of(lambda: sharded(*batch_of(rank, BAD)), NonFiniteError)
    assert "on every rank" in message


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "units"},
    "offload": {"offload": ("params", "activations")},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)},
    "overlap": {"schedule": "overlap"},
    "whole": {"strategy": "NO_SHARD"},
    "zero1": {"strategy": "SHARD_OPTIMIZER"},
    "zero2": {"strategy": "SHARD_GRAD_OP"},
    "parts": {"reshard_after_forward": 1, "reshard_root": True},
}


def beside(rank: int, name: str, **more: Any) -> None:
    """A healthy step passes, a bad one is told, and the next healthy one passes."""
    sharded = sharded_of(**OPTIONS.get(name, {}), **more)
    step(sharded, rank)
    with pytest.raises(NonFiniteError) as caught:
        step(sharded, rank, BAD if rank == 0 else SHIFTS)
    assert (caught.value.unit, caught.value.ranks) == ("blocks.1", (0,)), name
    assert "aten.log1p" in str(caught.value), name
    for buffer in sharded.buffers():  # NaN since the bad step, which is told in eager as well
        buffer.data.zero_()
    step(sharded, rank)


def beside_options(rank: int) -> None:
    for name in OPTIONS:
        beside(rank, name)


def beside_inductor(rank: int) -> None:
    beside(rank, "inductor", backend="inductor")


def micro_batches(rank: int) -> None:
    """Each micro-batch reports; the error says what to do about accumulated gradients."""
    sharded = sharded_of()
    with sharded.no_sync():
        step(sharded, rank)
        message = error_of(lambda: step(sharded, rank, BAD), NonFiniteError)
    assert "which the module's zero_grad() drops" in message
    sharded.zero_grad()
    with sharded.no_sync():
        step(sharded, rank)
    step(sharded, rank)
    assert all(grad.isfinite().all() for grad in grads_of(sharded))


def warns(rank: int) -> None:
    """With "warn" the step goes on, and its gradients are added; a check is searched once."""
    sharded = sharded_of("warn")
    for searched in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(sharded, rank, BAD if rank == 1 else SHIFTS)
        (warning,) = [w for w in caught if w.category is NonFiniteWarning]
        assert "unit 'blocks.1', in forward, on rank 1 of 2" in str(warning.message)
        assert ("aten.log1p" in str(warning.message)) is searched
    assert sharded.blocks[0].up.weight.grad is not None


class Scaled(nn.Module):
    """The gradient of `weight` is `scale`, and its backward divides by `below`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, scale: Tensor) -> Tensor:
        return (self.weight * scale).sum()


def sums_overflow(rank: int) -> None:
    """Gradients that are finite on each rank, but not their sum."""
    sharded = graphshard.compile(Scaled(), graphshard.SizePolicy(check_finite="error"))
    with pytest.raises(NonFiniteError) as caught:
        sharded(torch.full((1,), 3e38)).backward()
    assert "reduced gradients of the root unit" in str(caught.value)
    assert "the reduced gradient of 'weight' has inf in 1 of 1" in str(caught.value)
    sharded(torch.full((1,), 2.0)).backward()


class Distance(nn.Module):
    """The gradient of `weight` is NaN where it equals `x`: infinity times 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight - x).abs().sqrt().sum()


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Distance() for _ in range(3)])

    def forward(self, xs: Tensor) -> Tensor:
        return sum(part(x) for part, x in zip(self.parts, xs, strict=True))  # type: ignore[return-value]


def wrong_gradient(rank: int, **fields: Any) -> None:
    """Only one rank computes a wrong gradient, and others hold it once it is reduced."""
    mesh = fields.pop("mesh", None)
    policy = BlockPolicy({Distance}, **{"check_finite": "error"} | fields)
    sharded = graphshard.compile(Distances(), policy, mesh=mesh)
    bad = torch.distributed.get_world_size() - 1
    xs = torch.zeros(3, 4, 3)
    sharded(xs).backward()
    if rank == bad:
        xs[1, 0] = 1.0  # of the first rank's shard
    if policy.check_finite == "warn":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                sharded(xs).backward()
        first, second = (str(w.message) for w in caught if w.category is NonFiniteWarning)
        assert f"in the gradients of unit 'parts.1', in backward, on rank {bad} of " in first
        assert second.endswith("in the reduced gradients of unit 'parts.1', in backward")
        return
    with pytest.raises(NonFiniteError) as caught:
        sharded(xs).backward()
    assert (caught.value.unit, caught.value.ranks) == ("parts.1", (bad,)), fields
    assert "in the gradients of unit 'parts.1', in backward" in str(caught.value), fields
    assert "inf in 3 of 12 elements from finite operands" in str(caught.value), fields
    assert "return (self.weight - x).abs().sqrt().sum()" in str(caught.value), fields
    xs[1, 0] = 0.0
    sharded(xs).backward()


GRADIENT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": "NO_SHARD"},
    {"strategy": "SHARD_GRAD_OP"},
    {"schedule": "overlap"},
    {"mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)},
    {"check_finite": "warn"},
]


def wrong_gradients(rank: int) -> None:
    for fields in GRADIENT_OPTIONS:
        wrong_gradient(rank, **fields)


def in_backward(rank: int) -> None:
    """A gradient that overflows on one rank is told with the line of its forward."""
    sharded = sharded_of()
    loss = sharded(*batch_of(rank)) * (float("inf") if rank == 0 else 1.0)
    with pytest.raises(NonFiniteError) as caught:
        loss.backward()
    assert caught.value.phase == "backward"
    assert caught.value.ranks == (0,)
    assert "the gradient that backward was called with" in str(caught.value)


def wrong_ends(rank: int) -> None:
    """An input or a parameter that holds NaN is named."""
    sharded = sharded_of()
    inputs, shifts = batch_of(rank)
    inputs[3, 2] = float("nan")
    assert "the input 'args[0]' itself" in error_of(
        lambda: sharded(inputs, shifts).backward(), NonFiniteError
    )
    sharded = sharded_of()
    if rank == 1:
        with torch.no_grad():
            sharded.blocks[2].down.weight.to_local().fill_(float("nan"))
    message = error_of(lambda: step(sharded, rank), NonFiniteError)
    assert "first in the outputs of unit 'blocks.2', in forward, on every rank" in message
    assert "the parameter 'blocks.2.down.weight' itself" in message


class Masked(nn.Module):
    """Attention under a mask with -inf that the root makes and blocks pass on."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.mT) / 4 + mask
            return x + scores.softmax(-1) @ v, mask * 1.0

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5, 5))
        self.blocks = nn.ModuleList([self.Attention() for _ in range(2)])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        mask = torch.full((5, 5), float("-inf")).triu(1) + self.bias + bias
        for block in self.blocks:
            x, mask = block(x, mask)
        return x.pow(2).mean()


def masks_may_hold_infinities(rank: int) -> None:
    policy = BlockPolicy({Masked.Attention}, check_finite="error")
    sharded = graphshard.compile(Masked(), policy)
    x, bias = torch.randn(2, 5, WIDTH), torch.zeros(5, 5)
    bias[2, 1] = float("-inf")
    sharded(x, bias).backward()
    by_kind: dict[bool, int] = {False: 0, True: 0}
    for check in (n for n in sharded.program.nodes() if n.target is graphshard.ops.check_finite):
        masks = [v for v in check.args[0] if v.meta["val"].shape == (5, 5)]
        if check.meta["phase"] == "forward":
            by_kind["masked" in check.kwargs] += len(masks)
    assert by_kind == {False: 0, True: 2}, "that of the root, and what the first block returns"
    bias[0, 0] = float("nan")
    message = error_of(lambda: sharded(x, bias).backward(), NonFiniteError)
    assert "the input 'args[1]' itself" in message


ON_TWO = [
    one_rank_fails_all,
    sums_overflow,
    wrong_gradients,
    masks_may_hold_infinities,
]

test_on_two_ranks = on_ranks(ON_TWO, 2)
test_more_on_two_ranks = pytest.mark.slow(
    on_ranks(checks_of(globals(), but=ON_TWO), 2, timeout=300.0)
)
