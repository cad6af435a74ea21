"""Training on a mesh of two dimensions beside `fully_shard` and a single process."""

from __future__ import annotations

from functools import cache
from typing import Any

import parity
import torch.distributed as dist
from models import CASES, Case
from parity import LR, STEPS, Training, by_fully_shard, by_graphshard, difference
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard

GPT = CASES["gpt"]
BLOCK = graphshard.BlockPolicy({"Block"}, strategy="HYBRID_SHARD")


def mesh_of(*shape: int, names: tuple[str, ...] | None = ("replicate", "shard")) -> DeviceMesh:
    """Of two dimensions, or with `names=None` of any."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def by_one_process(case: Case = GPT) -> Training:
    return parity.by_one_process(case, dist.get_world_size(), dist.get_rank())


def like_fully_shard(
    mesh: DeviceMesh | None,
    options: dict[str, Any],
    *,
    exact: bool = True,
    case: Case = GPT,
    **fields: Any,
) -> parity.Difference:
    """Train as `fully_shard` does with `options`, and as one process does; the difference to that.

    Bit for bit as `fully_shard` where no average is over more than two ranks.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    ours = by_graphshard(case, world_size, rank, mesh=mesh, **fields)
    theirs = by_fully_shard(case, world_size, rank, mesh=mesh, **options)
    same = near(ours, theirs)
    if exact:
        assert same.exact, same
        assert same.params == same.buffers == 0, same
    return near(ours, by_one_process(case))


def near(ours: Training, expected: Training) -> parity.Difference:
    found = difference(ours, expected)
    assert found.losses == 0, found
    assert max(found.grads.values()) <= 1e-6, found
    assert found.params <= 0.01 * LR * STEPS, found
    return found
