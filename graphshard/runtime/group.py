"""The ranks a module is sharded over, as the runtime needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard import torch_compat
from graphshard.errors import PolicyError

# A reduce packs what is smaller than this many bytes into one message, and so does a gather. Gloo
# packs a coalesced gather by itself, and pays per tensor of a reduce: on 2 ranks 8 tensors of 2 KiB
# took 1.7 ms one by one and 0.3 ms packed, while above 1 MiB packing only adds its copies. NCCL
# launches a coalesced call as one kernel, in which a tiny tensor still costs a ring.
_PACK_GATHER_BELOW = {"gloo": 0, "nccl": 64 * 1024}
_PACK_REDUCE_BELOW = {"gloo": 1024 * 1024, "nccl": 64 * 1024}


# What every backend can move and, where it is no integer, add up.
MOVABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def movable(tensor: Tensor) -> Tensor:
    """Contiguous `tensor`, as bytes if no backend is sure to know its dtype."""
    return tensor if tensor.dtype in MOVABLE else tensor.view(-1).view(torch.uint8)


@dataclass
class Group:
    """One dimension of ranks. `process_group` is None for a single rank without one.

    check: poison what is freed.
    """

    process_group: Any
    rank: int
    size: int
    device: torch.device
    backend: str = "none"
    timeout: timedelta = timedelta(minutes=30)
    mesh: DeviceMesh | None = None
    check: bool = False

    @property
    def pack_gather_below(self) -> int:
        """Bytes of a shard below which a gather packs it."""
        return _PACK_GATHER_BELOW.get(self.backend, 0)

    @property
    def pack_reduce_below(self) -> int:
        """Bytes of a full gradient below which a reduce packs it."""
        return _PACK_REDUCE_BELOW.get(self.backend, 0)

    @property
    def store(self) -> Any:
        """The Store the ranks share."""
        return torch_compat.group_store(self.process_group)

    def from_first(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first rank's `tensor`, of this shape and dtype on every rank, on every rank."""
        if self.rank == 0:
            assert tensor is not None
            sent = tensor.detach().to(self.device, dtype).contiguous()
        else:
            sent = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.size > 1:
            dist.broadcast(movable(sent), group=self.process_group, group_src=0)
        return sent

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """The numbers `own` (of 64 bits) of every rank, in order; each gives equally many.

        Raises:
            RuntimeError: a rank died, or did not get here within the timeout.
        """
        sent = torch.tensor(own, device=self.device)
        received = sent.new_empty(self.size * len(own))
        # Not dist.all_gather_into_tensor: torch 2.13 renames it, and warns.
        self.process_group.allgather_into_tensor_coalesced([received], [sent]).wait()
        return received.view(self.size, -1).tolist()

    def everyones(self, value: Any) -> list[Any]:
        """The `value` (anything that can be pickled) of every rank, in order."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.process_group)
        return values


def find_group(
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    *,
    alone: torch.device | str = "cpu",
) -> Group:
    """The group of `mesh`; without one the default process group; without that a single rank.

    Args:
        mesh: one-dimensional, or None.
        device: where to run; None leaves it to the mesh or the group.
        alone: where a single rank without a group runs if `device` is None.

    Raises:
        PolicyError: the mesh has more than one dimension, or lies on another kind of device.
    """
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return Group(None, 0, 1, _indexed(alone if device is None else device))
    if mesh is None:
        by_nccl = torch.cuda.is_available() and "nccl" in dist.get_backend().lower()
        wanted = torch.device(device or ("cuda" if by_nccl else "cpu"))
        mesh = init_device_mesh(wanted.type, (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise PolicyError(
            f"parameters are sharded over a mesh of one dimension; got {mesh.ndim}; pass one "
            'dimension of it, such as mesh["shard"]'
        )
    where = _indexed(mesh.device_type if device is None else device)
    if where.type != mesh.device_type:
        raise PolicyError(
            f"the mesh lies on {mesh.device_type}, the model is to run on {where.type}; "
            "make them agree"
        )
    process_group = mesh.get_group(0)
    return Group(
        process_group,
        rank=mesh.get_local_rank(0),
        size=mesh.size(0),
        device=where,
        backend=torch_compat.group_backend(process_group, where),
        timeout=torch_compat.group_timeout(process_group, where),
        mesh=mesh,
    )


def _indexed(device: torch.device | str) -> torch.device:
    """`device` with its number, as tensors on it say it."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
