"""`reduce_op="sum"` on ranks: the bits of averages on 2 and 4, their numbers on 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_parity import GPT, mesh_of, near
from models import CASES
from parity import by_graphshard, difference
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from graphshard import BlockPolicy, MixedPrecision
from graphshard.errors import PolicyError

ALL = 1 << 40


def same_bits(rank: int, **options: Any) -> None:
    """Losses, gradients and weights of three steps are those of averages."""
    case, mesh = options.pop("case", GPT), options.pop("mesh", None)
    ranks = dist.get_world_size()
    averaged = by_graphshard(case, ranks, rank, mesh=mesh, **options)
    summed = by_graphshard(case, ranks, rank, mesh=mesh, reduce_op="sum", **options)
    found = difference(summed, averaged)
    assert found.exact, found
    assert found.params == 0, found


def sharded(rank: int) -> None:
    same_bits(rank)


def replicated(rank: int) -> None:
    same_bits(rank, strategy="NO_SHARD")


def by_all_reduce(rank: int) -> None:
    same_bits(rank, all_reduce_below=ALL)


def scheduled_and_offloaded(rank: int) -> None:
    same_bits(rank, schedule="overlap", hardware="cpu-gloo")
    same_bits(rank, offload=("params", "activations"))


def recomputed(rank: int) -> None:
    same_bits(rank, recompute="units", check_finite="error")


def in_bfloat16(rank: int) -> None:
    """Also where the reduce rounds: halves of bfloat16 lose no bit."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    same_bits(rank, mixed_precision=low)
    same_bits(rank, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def other_models(rank: int) -> None:
    for name in ("bert", "t5", "regnet"):
        same_bits(rank, case=CASES[name])


class Trunk(nn.Module):
    """Two outputs, an ignored head, and a gradient for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.left(h), self.right(h), x


def trained(rank: int, reduce_op: str, uses: tuple[int, ...], **options: Any) -> list[Tensor]:
    """The gradients of parameters and input, of `uses` outputs, after accumulation."""
    torch.manual_seed(0)
    policy = BlockPolicy({nn.Linear}, reduce_op=reduce_op, ignored="left", check_finite="error")
    module = graphshard.compile(Trunk(), policy, check=True, **options)
    grads = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, 4).requires_grad_()
        first = module(x)
        second = module(2 * x)  # two forwards before their backwards
        loss = sum(out.square().mean() for i in uses for out in (first[i], second[i]))
        if step < 2:
            with module.no_sync():
                loss.backward()
        else:
            loss.backward()
        grads.append(x.grad)
    grads += [p.grad for p in module.parameters()]
    return [
        g.full_tensor() if isinstance(g, DTensor) else g for g in grads if isinstance(g, Tensor)
    ]


def inputs_ignored_parameters_and_unused_outputs(rank: int) -> None:
    for uses in ((0, 1, 2), (1,), (0, 2)):
        averaged, summed = (trained(rank, op, uses) for op in ("avg", "sum"))
        assert len(averaged) == len(summed) > 3
        assert all(map(torch.equal, averaged, summed)), uses


def compiled(rank: int) -> None:
    averaged, summed = (trained(rank, op, (0, 1, 2), backend="inductor") for op in ("avg", "sum"))
    assert all(map(torch.allclose, averaged, summed))


ON_TWO = [sharded, inputs_ignored_parameters_and_unused_outputs]

test_on_two_ranks = on_ranks(ON_TWO, 2, timeout=240)

MORE_ON_TWO = [
    replicated,
    by_all_reduce,
    scheduled_and_offloaded,
    recomputed,
    in_bfloat16,
    other_models,
    compiled,
]

test_more_on_two_ranks = pytest.mark.slow(on_ranks(MORE_ON_TWO, 2, timeout=500))


def hybrid(rank: int) -> None:
    same_bits(rank, mesh=mesh_of(2, 2), strategy="HYBRID_SHARD")
    same_bits(rank, mesh=mesh_of(2, 2), strategy="NO_SHARD")


def partial(rank: int) -> None:
    same_bits(rank, reshard_after_forward=2)


def shards_accumulated(rank: int) -> None:
    """no_sync(all_reduce_only=True) keeps shards of sums."""
    found = []
    for op in ("avg", "sum"):
        torch.manual_seed(0)
        policy = BlockPolicy({"Block"}, strategy="HYBRID_SHARD", reduce_op=op)
        module = graphshard.compile(GPT.model(), policy, mesh=mesh_of(2, 2))
        with module.no_sync(all_reduce_only=True):
            module(**GPT.inputs(3 + rank)).backward()
        module(**GPT.inputs(7 + rank)).backward()
        found.append([p.grad.full_tensor() for p in module.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


ON_FOUR = [sharded, hybrid, partial, shards_accumulated]

test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=240))


def three_round_once_more(rank: int) -> None:
    """A third is rounded once for every tangent, so gradients agree to float32's precision."""
    averaged = by_graphshard(GPT, 3, rank)
    near(by_graphshard(GPT, 3, rank, reduce_op="sum"), averaged)


def three_refuse_what_they_would_round(rank: int) -> None:
    policy = BlockPolicy({nn.Linear}, reduce_op="sum", ignored="left")
    with pytest.raises(PolicyError, match=r"gradient of 'left.weight'.*3 is no power of two"):
        graphshard.compile(Trunk(), policy)(torch.randn(2, 4))


test_on_three_ranks = pytest.mark.slow(
    on_ranks([three_round_once_more, three_refuse_what_they_would_round], 3, timeout=240)
)
