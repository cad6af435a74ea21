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

    torch gathers by a coalesced call. Over Gloo the end of one and the begin of the next may
    overwrite memory, so a DTensor that is split once, by `Shard`, is gathered by another one there.

    Args:
        dtensor: of a dtype that the backend moves; at least one dim, at least one element.

    Returns:
        The tensor, on the device of the DTensor; it shares the memory of one that is whole here.

    Raises:
        RuntimeError: a rank died, or did not get here within the group's timeout.
    """
    mesh = dtensor.device_mesh
    split = [dim for dim, placement in enumerate(dtensor.placements) if placement != Replicate()]
    if len(split) != 1 or type(dtensor.placements[split[0]]) is not Shard or not dtensor.numel():
        return dtensor.full_tensor()
    group, dim = mesh.get_group(split[0]), dtensor.placements[split[0]].dim
    local = local_tensor(dtensor).detach()
    if group_backend(group, local.device) != "gloo" or group.size() == 1:
        return dtensor.full_tensor()
    # As Shard splits: each rank has so many rows, the last ones fewer or none.
    total, size = dtensor.shape[dim], group.size()
    rows = -(-total // size)
    mine = sent = local.movedim(dim, 0).contiguous()
    if len(mine) != rows:
        sent = mine.new_zeros((rows, *mine.shape[1:]))
        sent[: len(mine)] = mine
    received = mine.new_empty((size * rows, *mine.shape[1:]))
    gather = coalesced(group, "allgather_into_tensor_coalesced", "gloo")
    gather([received], [sent]).wait()
    if dim == 0 and total == len(received):
        return received
    return received[:total].movedim(0, dim).clone(memory_format=torch.contiguous_format)
