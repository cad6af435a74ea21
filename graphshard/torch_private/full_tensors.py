"""The whole of a DTensor, without the call by which torch gathers it over Gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from graphshard.torch_private.coalesced import coalesced
from graphshard.torch_private.compat import group_backend, local_tensor


def full_tensor(dtensor: Any) -> Tensor:
    """`dtensor.full_tensor()`, which every rank must call.

    torch gathers by a coalesced call. Over Gloo the end of one and the beginning of the next may
    overwrite memory, so a DTensor with dims that are split once each, by `Shard`, is gathered by
    another one there.

    Args:
        dtensor: of a dtype that the backend moves; at least one dim, at least one element.

    Returns:
        The tensor, on the device of the DTensor; it shares the memory of one that is whole here.
    """
    mesh, local = dtensor.device_mesh, local_tensor(dtensor).detach()
    split = {
        mesh_dim: placement.dim if type(placement) is Shard else None
        for mesh_dim, placement in enumerate(dtensor.placements)
        if placement != Replicate() and mesh.size(mesh_dim) > 1
    }
    groups = {mesh_dim: mesh.get_group(mesh_dim) for mesh_dim in split}
    if (
        None in split.values()
        or len(set(split.values())) < max(1, len(split))
        or not dtensor.numel()
        or any(group_backend(group, local.device) != "gloo" for group in groups.values())
    ):
        return dtensor.full_tensor()
    for mesh_dim, dim in split.items():
        local = _whole(local, dim, dtensor.shape[dim], groups[mesh_dim])
    return local


def _whole(local: Tensor, dim: Any, total: int, group: Any) -> Tensor:
    """`local`, which the ranks of `group` have parts of as `Shard(dim)` splits, in one piece."""
    # Each rank has so many rows, the last ones fewer or none.
    size = group.size()
    rows = -(-total // size)
    mine = sent = local.movedim(dim, 0).contiguous()
    if len(mine) != rows:
        sent = mine.new_zeros((rows, *mine.shape[1:]))
        sent[: len(mine)] = mine
    received = mine.new_empty((size * rows, *mine.shape[1:]))
    if received.numel():
        coalesced(group, "allgather_into_tensor_coalesced", "gloo")([received], [sent]).wait()
    if dim == 0 and total == len(received):
        return received
    return received[:total].movedim(0, dim).clone(memory_format=torch.contiguous_format)
