"""A step scheduled by cost gives, bit for bit, what FSDP's order gives, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from models import CASES, Block, ManyOutputs, TiedGPT, features_of, tokens_of
from ranks import Checks, on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import graphshard
from examples.benchmarks.live_bytes import LiveBytes
from graphshard.errors import FingerprintError

STEPS = 2
BF16 = graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(by_cost: bool, *, dynamic: Any = None, mesh: Any = None, **fields: Any) -> Any:
    """A model of three blocks with dropout and tied weights; freed storage is poisoned."""
    torch.manual_seed(0)
    # On such hardware all is latency, so much is gathered ahead and several reduces are under way.
    chosen = {"schedule": "overlap", "hardware": "h100-sxm"} if by_cost else {}
    return graphshard.compile(
        TiedGPT(layers=3),
        graphshard.BlockPolicy(Block, **chosen, **fields),
        check=True,
        dynamic=dynamic,
        mesh=mesh,
    )


def trained(rank: int, model: nn.Module, batch: Callable[[int, int], Any], micro: int) -> Any:
    """Per step the loss and the gradients; then the parameters: all this rank's own."""
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Tensor] = []
    for step in range(STEPS):
        for part in range(micro):
            torch.manual_seed(10 * step + part)
            with model.no_sync() if part < micro - 1 else nullcontext():
                loss = model(*batch(rank, micro * step + part))
                loss.backward()
            found.append(loss.detach().clone())
        grads = (p.grad.to_local() for p in model.parameters() if p.grad is not None)
        found += [grad.detach().clone() for grad in grads]
        optim.step()
        optim.zero_grad()
    return [*found, *(p.to_local().detach().clone() for p in model.parameters())]


def alike(
    rank: int,
    *,
    micro: int = 1,
    batch: Callable[[int, int], Any] = tokens_of,
    **options: Any,
) -> None:
    models = [sharded(by_cost, **options) for by_cost in (False, True)]
    expected, found = (trained(rank, model, batch, micro) for model in models)
    assert len(expected) == len(found) > 20
    assert all(map(torch.equal, expected, found))
    programs = models[1].programs
    assert all(program.budget is not None for program in programs)
    assert any(program.budget.unchanged_because is None for program in programs), (
        "nothing was scheduled anew"
    )


def accumulated(rank: int) -> None:
    alike(rank, micro=2)


def recomputed_in_16_bits(rank: int) -> None:
    alike(rank, recompute="units", reshard_root=True, mixed_precision=BF16)


def offloaded(rank: int) -> None:
    alike(rank, offload=("params", "activations"))


def dynamic(rank: int) -> None:
    def batch(rank: int, step: int) -> list[Tensor]:
        return [t[:, : 7 - step] for t in tokens_of(rank, step)]

    names = {"tokens": {1: "length"}, "targets": {1: "length"}}
    alike(rank, batch=batch, dynamic=names)


def evaluated(rank: int) -> None:
    models = [sharded(by_cost).eval() for by_cost in (False, True)]
    with torch.no_grad():
        expected, found = (model(*tokens_of(rank, 0)) for model in models)
    assert torch.equal(expected, found)


class Wide(nn.Module):
    """Blocks so wide that gradients are not packed to be reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(768, 768) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x.square().mean()


def in_no_more_memory(rank: int) -> None:
    """The most bytes that live in a step, after one that set everything up."""
    peaks = []
    for chosen in ({}, {"schedule": "overlap", "hardware": "cpu-gloo"}):
        torch.manual_seed(0)
        model = graphshard.compile(Wide(), graphshard.BlockPolicy(nn.Linear, **chosen))
        inputs = torch.randn(16, 768)
        model(inputs).backward()
        for param in model.parameters():
            param.grad = None
        with LiveBytes() as live:
            live.add([inputs, list(model.parameters())])
            model(inputs).backward()
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0]


def as_fully_shard(rank: int) -> None:
    fields = {"schedule": "overlap", "hardware": "h100-sxm"}
    for outcome in parity.compare(rank, ("gpt",), fields).values():
        parity.check(outcome)


def sizes_that_differ_are_told(rank: int) -> None:
    """FSDP's order does not mind; what is merged or split depends on how long compute takes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.zeros(400_000 if rank else 2, 4)
    plain = graphshard.compile(copy.deepcopy(model), graphshard.BlockPolicy(nn.Linear))
    plain(x).sum().backward()
    by_cost = graphshard.BlockPolicy(nn.Linear, schedule="overlap")
    sharded = graphshard.compile(model, by_cost)
    with pytest.raises(FingerprintError, match="would issue different collectives"):
        sharded(x)


CHECKS = [
    accumulated,
    in_no_more_memory,
    as_fully_shard,
    sizes_that_differ_are_told,
]
MORE_CHECKS = [
    offloaded,
    recomputed_in_16_bits,
    dynamic,
    evaluated,
]

test_two_ranks_give_what_fsdp_s_order_gives = on_ranks(CHECKS, 2, timeout=300)
test_more_two_ranks_give_what_fsdp_s_order_gives = pytest.mark.slow(
    on_ranks(MORE_CHECKS, 2, timeout=300)
)


@pytest.mark.slow
def test_two_ranks_train_as_fully_shard_does() -> None:
    fields = {"schedule": "overlap", "hardware": "h100-sxm"}
    for of_rank in run_ranks(parity.compare, 2, tuple(CASES), fields, timeout=300):
        for outcome in of_rank.values():
            parity.check(outcome)


def by_other_strategies(rank: int) -> None:
    for strategy in ("SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"):
        alike(rank, strategy=strategy)
    alike(rank, offload="params", mixed_precision=BF16)


def where_outputs_go_unused(rank: int) -> None:
    found = []
    for chosen in ({}, {"schedule": "overlap", "hardware": "h100-sxm"}):
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy(nn.Linear, **chosen)
        model = graphshard.compile(ManyOutputs(), policy, check=True)
        model(*features_of(rank, 0, 6))["pair"][1].sum().backward()
        found.append(
            [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        )
    for expected, grad in zip(*found, strict=True):
        assert grad is expected or torch.equal(grad, expected)


@pytest.mark.slow
@pytest.mark.parametrize("check", [by_other_strategies, where_outputs_go_unused])
def test_two_ranks_agree_by_other_strategies(check: Callable[[int], None]) -> None:
    Checks([check], 2, timeout=300).require(check)


def on_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for fields in ({}, {"offload": "params"}, {"mixed_precision": BF16, "recompute": "units"}):
        alike(rank, mesh=mesh, strategy="HYBRID_SHARD", **fields)
    alike(rank, strategy="FULL_SHARD", reshard_after_forward=2)
    dist.barrier()


@pytest.mark.slow
def test_four_ranks_agree_with_fsdp_s_order() -> None:
    Checks([on_a_mesh], 4, timeout=300).require(on_a_mesh)
