"""`iter_full` hands out whole tensors one after another, in bounded memory."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import checks_of, error_of, on_ranks, run_ranks
from resident import growth, map_each_above, require_proc
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.errors import CheckpointError, FingerprintError
from graphshard.module.sharded_module import ShardedModule

POLICY = graphshard.BlockPolicy({nn.Linear})
HYBRID = graphshard.BlockPolicy({nn.Linear}, strategy="HYBRID_SHARD")


class Odd(nn.Module):
    """Sizes that ranks cannot share evenly, a tied weight, and all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.norm = nn.BatchNorm1d(5)
        self.single = nn.Parameter(torch.randn(1))
        self.sixteen = nn.Parameter(torch.randn(4, 3).half(), requires_grad=False)
        self.register_buffer("counts", torch.arange(6))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x)) * self.single


def equals_full_state_dict(sharded: ShardedModule, **options: int) -> None:
    expected = sharded.full_state_dict(rank0_only=False)
    found = list(sharded.iter_full(**options))
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    for _, tensor in found:
        tensor.zero_()  # which is not the module's own memory
    for name, tensor in sharded.full_state_dict(rank0_only=False).items():
        assert torch.equal(tensor, expected[name]), name


def gives_what_full_state_dict_gives(rank: int) -> None:
    by_dim_1 = graphshard.ModulePolicy({nn.Linear: {"placement": 1}})
    column = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 6))
    for sharded in (
        graphshard.compile(Odd(), POLICY),
        graphshard.compile(Odd(), graphshard.BlockPolicy({nn.Linear}, strategy="NO_SHARD")),
        graphshard.compile(Odd(), graphshard.BlockPolicy({nn.Linear}, strategy="SHARD_OPTIMIZER")),
        graphshard.compile(Odd(), graphshard.BlockPolicy({nn.Linear}, ignored=["single"])),
        graphshard.compile(column, by_dim_1),
        graphshard.compile(Odd(), HYBRID, mesh=init_device_mesh("cpu", (1, 2))),
        graphshard.compile(Odd(), HYBRID, mesh=init_device_mesh("cpu", (2, 1))),
    ):
        equals_full_state_dict(sharded)
        equals_full_state_dict(sharded, max_bytes=10**6)
        equals_full_state_dict(sharded, max_bytes=2000)
    with torch.inference_mode():
        for _, tensor in sharded.iter_full():
            assert not tensor.is_inference()


def values_are_cast(rank: int) -> None:
    sharded = graphshard.compile(Odd(), POLICY)
    expected = sharded.full_state_dict(rank0_only=False)
    for name, tensor in sharded.iter_full(dtype=torch.bfloat16):
        floats = expected[name].is_floating_point()
        assert tensor.dtype == (torch.bfloat16 if floats else expected[name].dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype))


def a_tensor_that_takes_more_is_named(rank: int) -> None:
    sharded = graphshard.compile(Odd(), POLICY)
    text = error_of(lambda: sharded.iter_full(max_bytes=120), CheckpointError)
    assert "gathering 'embed.weight' takes 160 bytes" in text  # 8 rows, one of them padding
    assert "more than max_bytes=120" in text


def a_rank_that_stops_is_an_error_on_all(rank: int) -> None:
    sharded = graphshard.compile(Odd(), POLICY)

    def parts() -> None:
        for number, _ in enumerate(sharded.iter_full(max_bytes=200)):
            if rank == 0 and number == 2:
                break
        sharded.full_state_dict()

    began = time.monotonic()
    text = error_of(parts, FingerprintError)
    assert time.monotonic() - began < 20
    assert "full_state_dict" in text
    assert "iter_full(max_bytes=200), batch" in text
    for _ in range(2):  # all may stop alike
        next(iter(sharded.iter_full(max_bytes=200)))
    equals_full_state_dict(sharded)


test_on_two_ranks = on_ranks(
    checks_of(globals()),
    2,
    timeout=300,
)


def test_on_one_rank() -> None:
    equals_full_state_dict(graphshard.compile(Odd(), POLICY))


# -- memory ----------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 12
MATRIX = WIDTH * WIDTH * 4
FEW = 4.0
"""MB of heaps and threads beside the tensors; less than one of them."""


def measured(rank: int) -> dict[str, float]:
    """Peak MB above the shards, by `max_bytes`."""
    map_each_above(1 << 16)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    sharded = graphshard.compile(nn.Sequential(*layers), POLICY)
    del layers
    peaks: dict[str, float] = {}
    for max_bytes in (8 * MATRIX, 8 * MATRIX, 2 * MATRIX + 10**5):  # once to warm up
        with growth(peaks, str(max_bytes)):
            for _, tensor in sharded.iter_full(max_bytes=max_bytes):
                assert tensor.isfinite().all()
        del tensor
    dist.barrier()
    return peaks


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    require_proc()
    for rank, peaks in enumerate(run_ranks(measured, 2, timeout=200)):
        for max_bytes, peak in peaks.items():
            bound = int(max_bytes) / 1e6
            print(f"rank {rank}: {peak:.1f} MB with max_bytes={bound:.1f} MB")
            assert peak <= bound + FEW
