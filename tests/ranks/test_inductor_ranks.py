"""Compiled regions on ranks give what operators give one by one, within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, Block, TiedGPT, loss_of, tokens_of
from ranks import on_ranks, run_ranks
from torch import Tensor, nn

import graphshard
from graphshard.torch_private import inductor as torch_inductor

FP32, BF16 = 1e-5, 2e-2
HALVES = graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(rank: int, model: Any, batch: Any, backend: str, policy: Any, **options: Any) -> Any:
    """Losses, this rank's gradients, what the random stream goes on with, a loss in eval mode."""
    sharded = graphshard.compile(model, policy, backend=backend, **options)
    optim = torch.optim.SGD(sharded.parameters(), lr=0.05)
    found: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        inputs = batch(rank, step)
        output = sharded(**inputs) if isinstance(inputs, dict) else sharded(*inputs)
        loss_of(output).backward()
        grads = (p.grad for p in sharded.parameters() if p.grad is not None)
        found += [loss_of(output).detach(), *(grad.to_local().clone() for grad in grads)]
        found.append(torch.rand(2))
        optim.step()
        optim.zero_grad()
    sharded.eval()
    with torch.no_grad():
        output = sharded(**inputs) if isinstance(inputs, dict) else sharded(*inputs)
    return [*found, loss_of(output), *(b.float() for b in sharded.buffers())], sharded


def alike(
    rank: int,
    model: nn.Module | None = None,
    batch: Any = tokens_of,
    blocks: Any = (Block,),
    tolerance: float = FP32,
    policy: Any = None,
    dynamic: Any = None,
    **fields: Any,
) -> Any:
    torch.manual_seed(0)
    model = model or TiedGPT(2)
    policy = policy or graphshard.BlockPolicy(blocks, **fields)
    expected, _ = trained(rank, model, batch, "eager", policy, dynamic=dynamic)
    found, sharded = trained(rank, model, batch, "inductor", policy, dynamic=dynamic)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return sharded


def compiled(sharded: Any) -> Any:
    assert sharded.programs[0].regions.forms
    assert not any(program.regions.fell_back for program in sharded.programs)
    return sharded


def tied_with_dropout(rank: int) -> None:
    assert compiled(alike(rank)).programs[0].regions.distinct <= 8


def one_rank_that_cannot_compile(rank: int) -> None:
    """Its regions run operator by operator, to the same end; nobody waits for it in vain."""
    original = torch_inductor.compile_graph

    def fails(*args: Any) -> Any:
        raise RuntimeError("no compiler here")

    if rank == 1:
        torch_inductor.compile_graph = fails
    try:
        sharded = alike(rank, TiedGPT(1))
    finally:
        torch_inductor.compile_graph = original
    fell_back = sharded.programs[0].regions.fell_back
    assert len(fell_back) == (len(sharded.programs[0].regions.forms) if rank == 1 else 0)
    told: list[Any] = [None, None]
    dist.all_gather_object(told, "no compiler here" in str(sharded.plan))
    assert told == [False, True]


CHECKS = [tied_with_dropout, one_rank_that_cannot_compile]


test_two_ranks = on_ranks(CHECKS, 2, timeout=400.0, group_timeout=300.0)


@pytest.mark.slow
def test_a_second_process_finds_the_regions_on_disk() -> None:
    run_ranks(_found, 2, timeout=300.0)
    for hits, misses, forms in run_ranks(_found, 2, timeout=300.0):
        assert misses == 0
        assert hits == forms > 0


def _found(rank: int) -> tuple[int, int, int]:
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy(Block)
    sharded = graphshard.compile(
        TiedGPT(2), policy, example_inputs=tokens_of(rank, 0), backend="inductor"
    )
    counts = torch_inductor.counts()
    assert sharded.program.regions is not None
    return counts["hit"], counts["miss"] + counts["bypass"], sharded.program.regions.distinct


# -- more models and options ----------------------------------------------------------------------


def batch_norm(rank: int) -> None:
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*body)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).sigmoid().mean()

    def batch(rank: int, step: int) -> list[Tensor]:
        return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + rank))]

    compiled(alike(rank, Net(), batch, policy=graphshard.SizePolicy(min_num_params=100)))


def norms_under_autocast(rank: int) -> None:
    """Their statistics are float32 by the real kernels alone, and cross between regions."""

    class Net(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv1d(4, 4, 3), norm, nn.Conv1d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x).tanh())).float().sigmoid().sum()

    def batch(rank: int, step: int) -> list[Tensor]:
        return [torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(2 * step + rank))]

    for norm in (
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=False),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(14),
    ):
        torch.manual_seed(0)  # the same weights on both ranks
        with torch.autocast("cpu", torch.bfloat16):
            compiled(alike(rank, Net(norm), batch, (nn.Conv1d,), tolerance=BF16))


def llama(rank: int) -> None:
    case = CASES["llama"]

    def batch(rank: int, step: int) -> dict[str, Tensor]:
        return case.inputs(5 * step + rank)

    sharded = compiled(alike(rank, case.model(), batch, case.blocks))
    assert sharded.programs[0].regions.distinct <= 8


def in_16_bits(rank: int) -> None:
    compiled(alike(rank, tolerance=BF16, mixed_precision=HALVES, recompute="selective"))


def dynamic_and_offloaded(rank: int) -> None:
    def batch(rank: int, step: int) -> list[Tensor]:
        return [t[:, : 7 - 2 * step].contiguous() for t in tokens_of(rank, step)]

    names = {"tokens": {1: "length"}, "targets": {1: "length"}}
    offload = ("params", "activations")
    sharded = compiled(alike(rank, batch=batch, dynamic=names, offload=offload))
    assert len(sharded.programs) == 2  # train and eval


WIDE = [batch_norm, norms_under_autocast, llama, in_16_bits, dynamic_and_offloaded]

test_two_ranks_of_more = pytest.mark.slow(on_ranks(WIDE, 2, timeout=595, group_timeout=300))
