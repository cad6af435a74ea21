"""The ranks a module runs on, and the smaller groups among them, as the runtime needs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard.errors import PolicyError
from graphshard.program import ops
from graphshard.program.packing import GATHER_BELOW, MOVABLE, REDUCE_BELOW
from graphshard.runtime import streams as side_streams
from graphshard.runtime.gloo import UP_TO, PairwiseExchange
from graphshard.runtime.streams import SideStream
from graphshard.torch_private import compat as torch_compat


def movable(tensor: Tensor) -> Tensor:
    """Contiguous `tensor`, as bytes if no backend is sure to know its dtype."""
    return tensor if tensor.dtype in MOVABLE else as_bytes(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """Contiguous `tensor` as bytes."""
    return tensor.view(-1).view(torch.uint8)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass
class Group:
    """Ranks that communicate. `process_group` is None for a single rank without one.

    The group of all ranks also knows those of each dimension of its mesh.

    mesh_shape: `(ranks,)`, or `(replicas, ranks to shard over)`.
    check: poison what is freed.
    peers: what gathers and reduces go through instead of the backend's collectives, if anything.
    side stream: the stream its collectives run on; None where the host waits for them.
    """

    process_group: Any
    rank: int
    size: int
    device: torch.device
    backend: str = "none"
    timeout: timedelta = timedelta(minutes=30)
    mesh: DeviceMesh | None = None
    check: bool = False
    mesh_shape: tuple[int, ...] = (1,)
    parts: dict[str, Group] = field(default_factory=dict, repr=False)
    peers: PairwiseExchange | None = field(default=None, repr=False)
    side_stream: SideStream | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Gloo moves a device's tensors through the host, which waits for that.
        if self.side_stream is None and self.process_group is not None and self.backend != "gloo":
            self.side_stream = side_streams.new_side_stream(self.device)

    def named(self, name: str) -> Group:
        """The group of this rank that a collective's `group` names; see `graphshard.ops`."""
        part = self.parts.get(name)
        if part is None:
            return self
        part.check = self.check
        return part

    def within(self, ranks: int) -> Group:
        """The `ranks` neighbours of this rank, itself among them, in the group it shards over.

        Ranks must ask for it at the same point the first time.
        """
        name = f"{ops.RESHARD} {ranks}"
        if name not in self.parts:
            process_group = self.shard.process_group
            members = dist.get_process_group_ranks(process_group)
            start = self.shard.rank // ranks * ranks
            made = subgroup(members[start : start + ranks], process_group)
            self.parts[name] = _group_of(made, self.device)
        return self.named(name)

    @property
    def shard(self) -> Group:
        """The ranks that this rank's parameters are sharded over."""
        return self.named(ops.SHARD)

    @property
    def pack_gather_below(self) -> int:
        """Bytes of a shard below which a gather packs it."""
        return GATHER_BELOW.get(self.backend, 0)

    @property
    def pack_reduce_below(self) -> int:
        """Bytes of a full gradient below which a reduce packs it."""
        return REDUCE_BELOW.get(self.backend, 0)

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
        if self.peers is not None:
            parts = received.view(self.size, -1).unbind()
            parts[self.rank].copy_(sent)
            for work in self.peers.exchange([[sent] * self.size], [parts]):
                work.wait()
            return received.view(self.size, -1).tolist()
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
    hybrid: bool = False,
) -> Group:
    """The group of `mesh`; without one the default process group; without that a single rank.

    Args:
        mesh: of one dimension, or of two: the first replicates, the last shards. Or None.
        device: where to run; None leaves it to the mesh or the group.
        alone: where a single rank without a group runs if `device` is None.
        hybrid: without a mesh, make one of two dimensions: ranks of one node share the shards.

    Raises:
        PolicyError: the mesh has more dimensions, or lies on another kind of device; or the ranks
            of a node are asked for and not known.
    """
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        where = _indexed(alone if device is None else device)
        return Group(None, 0, 1, where, mesh_shape=(1, 1) if hybrid else (1,))
    if mesh is None:
        by_nccl = torch.cuda.is_available() and "nccl" in dist.get_backend().lower()
        wanted = torch.device(device or ("cuda" if by_nccl else "cpu"))
        if hybrid:
            sizes, names = _by_node(wanted), ("replicate", "shard")
            mesh = init_device_mesh(wanted.type, sizes, mesh_dim_names=names)
        else:
            mesh = init_device_mesh(wanted.type, (dist.get_world_size(),))
    if mesh.ndim > 2:
        raise PolicyError(
            "parameters are sharded over the last dimension of a mesh and replicated over the "
            f"first; got one of {mesh.ndim} dimensions; pass one or two of them, such as "
            'mesh["replicate", "shard"]'
        )
    where = _indexed(mesh.device_type if device is None else device)
    if where.type != mesh.device_type:
        raise PolicyError(
            f"the mesh lies on {mesh.device_type}, the model is to run on {where.type}; "
            "make them agree"
        )
    whole = replace(
        _group_of(mesh.get_group(0) if mesh.ndim == 1 else _flat(mesh), where),
        mesh=mesh,
        mesh_shape=tuple(mesh.shape),
    )
    if mesh.ndim == 2:
        whole.parts[ops.REPLICATE] = _group_of(mesh.get_group(0), where)
        whole.parts[ops.SHARD] = _group_of(mesh.get_group(1), where)
    return whole


def _group_of(process_group: Any, device: torch.device) -> Group:
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    backend = torch_compat.group_backend(process_group, device)
    sends = backend == "gloo" and device.type == "cpu" and 1 < size <= UP_TO
    return Group(
        process_group,
        rank=rank,
        size=size,
        device=device,
        backend=backend,
        timeout=torch_compat.group_timeout(process_group, device),
        peers=PairwiseExchange(process_group, rank, size) if sends else None,
    )


def _by_node(device: torch.device) -> tuple[int, int]:
    """(nodes, ranks per node), as torch's FSDP1 takes them where it is given no groups.

    Raises:
        PolicyError: the ranks of a node are not known, or differ.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(given) if given.isdecimal() else 0
    if not ranks and device.type == "cuda":
        ranks = torch.cuda.device_count()
    world_size = dist.get_world_size()
    if not ranks or world_size % ranks:
        known = f"each node has {ranks} of the {world_size}" if ranks else "no one says how many"
        raise PolicyError(
            "a HYBRID strategy without a mesh shards over the ranks of a node and replicates over "
            f"the nodes, and {known}; start ranks with torchrun, which sets LOCAL_WORLD_SIZE, or "
            "pass mesh=init_device_mesh(device, (replicas, ranks to shard over))"
        )
    return world_size // ranks, ranks


def _flat(mesh: DeviceMesh) -> Any:
    """The process group of all ranks of `mesh`."""
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return subgroup(ranks, mesh.get_group(mesh.ndim - 1))


def subgroup(ranks: Sequence[int], like: Any) -> Any:
    """A new process group of `ranks` (global ones, this rank among them), set up as `like`.

    Every one of them makes it, at the same point; no other rank takes part.
    """
    return dist.new_group(
        ranks=list(ranks),
        backend=dist.get_backend_config(like),
        use_local_synchronization=True,
        group_desc="graphshard",
    )


def _indexed(device: torch.device | str) -> torch.device:
    """`device` with its number, as tensors on it say it."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
