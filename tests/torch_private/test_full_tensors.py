"""A DTensor is whole on every rank as torch makes it, without torch's own gather over Gloo."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from graphshard.torch_private.dtensors import full_tensor

ONE_SPLIT: list[tuple[tuple[int, ...], Placement]] = [
    ((8, 3), Shard(0)),
    ((7, 3), Shard(0)),
    ((1, 3), Shard(0)),  # no rows on the second rank
    ((3, 6), Shard(1)),
    ((3, 5, 2), Shard(1)),
    ((5,), Shard(0)),
]


def as_torch_makes_it(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for shape, placement in ONE_SPLIT:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
            split = distribute_tensor(tensor, mesh, [placement])
            with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError):
                whole = full_tensor(split)
            by_torch = split.redistribute(mesh, [Replicate()]).to_local()
            assert torch.equal(whole, tensor)
            assert torch.equal(by_torch, tensor)
            assert whole.stride() == tensor.stride()
            if not torch.__version__.startswith("2.11."):
                assert by_torch.stride() == tensor.stride()
            assert whole.untyped_storage().nbytes() == tensor.nbytes


def by_torch_where_it_is_not_split_once(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Partial()):
        one = DTensor.from_local(torch.ones(3), mesh, [placement], run_check=False)
        assert torch.equal(full_tensor(one), one.redistribute(mesh, [Replicate()]).to_local())
    empty = distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)])
    assert full_tensor(empty).shape == (0, 3)


def within_the_rows_of_a_mesh(rank: int) -> None:
    tensor = torch.arange(15.0).reshape(5, 3)
    mesh = init_device_mesh("cpu", (2, 2))
    placements: list[list[Placement]] = [[Replicate(), Shard(0)], [Shard(1), Replicate()]]
    for each in [*placements, [Shard(0), Shard(1)]]:
        assert torch.equal(full_tensor(distribute_tensor(tensor, mesh, each)), tensor)


test_on_two_ranks = on_ranks([as_torch_makes_it, by_torch_where_it_is_not_split_once], 2)
test_on_four_ranks = pytest.mark.slow(on_ranks([within_the_rows_of_a_mesh], 4))
