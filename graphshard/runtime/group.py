"""The ranks and the device that a module runs on, found or refused, and groups among the ranks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard.errors import GraphshardError, PolicyError, warn_user
from graphshard.planning.planner import mesh_sizes
from graphshard.program import ops
from graphshard.program.packing import MOVABLE
from graphshard.runtime import streams as side_streams
from graphshard.runtime.gloo import (
    MAX_RANKS,
    PairwiseExchange,
    let_readers_wait,
    let_threads_finish,
)
from graphshard.runtime.streams import SideStream
from graphshard.runtime.whereabouts import Whereabouts
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.coalesced import coalesced
from graphshard.torch_private.dtensors import let_meshes_mix

logger = logging.getLogger("graphshard")


def movable(tensor: Tensor) -> Tensor:
    """The contiguous `tensor`, viewed as flat bytes if a backend may not know its dtype."""
    return tensor if tensor.dtype in MOVABLE else as_bytes(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """The contiguous `tensor`, viewed as flat uint8."""
    return tensor.view(-1).view(torch.uint8)


def as_reals(tensor: Tensor) -> Tensor:
    """`tensor`, or a complex one as reals `(..., 2)`, which every backend can reduce."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass
class Group:
    """Ranks that communicate.

    process_group: None for a single rank without one.
    rank, size: this process's rank in the group, and its number of ranks.
    device: where this rank computes.
    backend: the backend for that device, such as "gloo"; "none" without a process group.
    timeout: how long a rank waits for the others.
    mesh: the mesh of all ranks, on the group of all ranks only.
    check: poison memory instead of freeing it.
    mesh_shape: `(ranks,)`, or `(replicas, ranks to shard over)`.
    subgroups: by name, the groups of the mesh's dimensions and those of `within`.
    pairwise: sends and receives in place of the backend's collectives; None to use these.
    side_stream: the stream that collectives run on; None where the host waits for them.
    replica_all_reduce: the caller's function that averages over replicas; on the group of all ranks
        only. None: the process group of "replicate" does.
    hosts: of the ranks that Gloo connects.
    here: where this rank is in the module's programs; that of all ranks, in each smaller group.
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
    subgroups: dict[str, Group] = field(default_factory=dict, repr=False)
    pairwise: PairwiseExchange | None = field(default=None, repr=False)
    side_stream: SideStream | None = field(default=None, repr=False)
    replica_all_reduce: Callable[[Tensor], Any] | None = None
    hosts: int = 1
    here: Whereabouts = field(default_factory=Whereabouts, repr=False, compare=False)
    _grids: dict[tuple[int, ...], DeviceMesh] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Gloo moves tensors of a device through the host, which waits for it.
        if self.side_stream is None and self.process_group is not None and self.backend != "gloo":
            self.side_stream = side_streams.communicator_stream(self.device)

    def named(self, name: str) -> Group:
        """The subgroup that a collective's `group` names; this group if there is none."""
        group = self.subgroups.get(name)
        if group is None:
            return self
        group.check, group.here = self.check, self.here
        return group

    def within(self, ranks: int) -> Group:
        """The group of `ranks` neighbours, this rank among them, in the group it shards over.

        Its process group is created at the first call, which all ranks must make at the same point.
        """
        name = f"{ops.RESHARD} {ranks}"
        if name not in self.subgroups:
            start = self.shard.rank // ranks * ranks
            members = range(start, start + ranks)
            self.subgroups[name] = self.shard.new_group(members, callers=self.size)
        return self.named(name)

    def new_group(self, ranks: Iterable[int], *, callers: int) -> Group:
        """A new group of some `ranks` of this one; see `new_process_group`."""
        of_all = dist.get_process_group_ranks(self.process_group)
        members = [of_all[rank] for rank in ranks]
        made = new_process_group(members, self.process_group, self.device, callers=callers)
        return group_of(made, self.device)

    def grid(self, parts: tuple[int, ...]) -> Any:
        """The mesh whose last dimensions, of `parts` ranks, are the ranks that are sharded over.

        Its process groups are created at the first call, which all ranks must make at the same
        point.
        """
        if self.mesh is None or len(parts) < 2:
            return self.mesh
        if parts not in self._grids:
            let_meshes_mix()
            ranks = self.mesh.mesh.view(*self.mesh.shape[:-1], *parts)
            here = (*(self.mesh.get_coordinate() or ())[:-1], *divmod(self.shard.rank, parts[-1]))
            groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim - 1)]
            for dim in range(len(groups), ranks.ndim):
                line: tuple[Any, ...] = (*here[:dim], slice(None), *here[dim + 1 :])
                like = self.shard.process_group
                groups.append(
                    new_process_group(ranks[line].tolist(), like, self.device, callers=self.size)
                )
            names = ("replicate", "shard", "shard_within")[-ranks.ndim :]
            self._grids[parts] = DeviceMesh.from_group(
                groups, self.mesh.device_type, ranks, mesh_dim_names=names
            )
        return self._grids[parts]

    @property
    def runs_on(self) -> str:
        """The kind of device that ranks compute on, the backend between them, and their hosts."""
        kind = self.device.type
        if self.process_group is None:
            return kind
        between = f" between {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{kind} by {self.backend}{between}"

    @property
    def shard(self) -> Group:
        """The ranks that this rank's parameters are sharded over."""
        return self.named(ops.SHARD)

    @property
    def store(self) -> Any:
        """The `torch.distributed.Store` that the ranks share."""
        return torch_compat.group_store(self.process_group)

    def broadcast(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first rank's `tensor`, on this group's device in `dtype`; that of others is ignored.

        Every rank gives its shape.
        """
        if self.rank == 0:
            assert tensor is not None
            sent = tensor.detach().to(self.device, dtype).contiguous()
        else:
            sent = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.size > 1:
            dist.broadcast(movable(sent), group=self.process_group, group_src=0)
        return sent

    def gather_tensor(self, sent: Tensor, *, meets: bool = False) -> Tensor:
        """The `sent` of every rank, `(n,)` on this group's device: `(ranks, n)`, in rank order.

        meets: see `PairwiseExchange.exchange`.
        """
        received = sent.new_empty(self.size * sent.numel())
        if self.pairwise is not None:
            by_rank = received.view(self.size, -1).unbind()
            by_rank[self.rank].copy_(sent)
            for work in self.pairwise.exchange([[sent] * self.size], [by_rank], meets=meets):
                work.wait()
            return received.view(self.size, -1)
        # Not dist.all_gather_into_tensor: torch 2.13 renames it, and warns.
        gather = coalesced(self.process_group, "allgather_into_tensor_coalesced", self.backend)
        gather([received], [sent]).wait()
        return received.view(self.size, -1)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The `value` of every rank, in rank order; it must be picklable."""
        values: list[Any] = [value] * self.size
        if self.size > 1 and self.backend != "fake":
            dist.all_gather_object(values, value, group=self.process_group)
        return values


def find_group(
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    *,
    alone: torch.device | str = "cpu",
) -> Group:
    """The group of `mesh`; without one the default process group; without that a single rank.

    mesh: of one dimension, or of two: the first replicates, the last shards. Or None.
    device: where to run; None leaves it to the mesh or the group.
    alone: where a single rank without a group runs if `device` is None.
    """
    group = meeting_group(mesh, device, alone=alone)
    return with_mesh(group, mesh_of(group, mesh, device))


def meeting_group(
    mesh: DeviceMesh | None, device: torch.device | str | None, *, alone: torch.device | str = "cpu"
) -> Group:
    """The ranks of `find_group` with these arguments, without the groups of a mesh's dimensions."""
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return Group(None, 0, 1, _indexed(alone if device is None else device))
    if mesh is None:
        # A group that was made without a backend has NCCL for CUDA and Gloo for the CPU.
        by_nccl = "cuda:nccl" in dist.get_backend_config().lower() and torch.cuda.is_available()
        device = _indexed(device or ("cuda" if by_nccl else "cpu"))
        try:
            return group_of(dist.group.WORLD, device)
        except RuntimeError:  # which has no backend for this device; a mesh gets another group
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            return replace(group_of(mesh.get_group(0), device), mesh=mesh)
    kind = mesh.device_type
    if device is None or torch.device(device).type != kind:
        device = kind
    process_group = mesh.get_group(0) if mesh.ndim == 1 else _flat(mesh)
    return replace(group_of(process_group, _indexed(device)), mesh=mesh)


def mesh_of(
    group: Group,
    mesh: DeviceMesh | Sequence[int] | str | None,
    device: torch.device | str | None,
    *,
    hybrid: bool = False,
) -> tuple[int, ...]:
    """The shape of the mesh of `group`, which was found with these arguments of `find_group`.

    hybrid: without a mesh, one of two dimensions that shards over the ranks of a node.
    """
    if isinstance(mesh, str | Sequence):
        return mesh_sizes(mesh)
    if mesh is None:
        if group.process_group is None:
            return (1, 1) if hybrid else (1,)
        return _by_node(group.device) if hybrid else (group.size,)
    if mesh.ndim > 2:
        raise PolicyError(
            "parameters are sharded over the last dimension of a mesh and replicated over the "
            f"first; got one of {mesh.ndim} dimensions; pass one or two of them, such as "
            'mesh["replicate", "shard"]'
        )
    if device is not None and torch.device(device).type != mesh.device_type:
        raise PolicyError(
            f"the mesh lies on {mesh.device_type}, the model is to run on "
            f"{torch.device(device).type}; make them agree"
        )
    return tuple(mesh.shape)


def with_mesh(group: Group, shape: tuple[int, ...]) -> Group:
    """`group` with its mesh of `shape` and the groups of its dimensions; all ranks call this."""
    if group.process_group is None:
        return replace(group, mesh_shape=shape)
    mesh = group.mesh
    if mesh is None or tuple(mesh.shape) != shape:
        names = ("replicate", "shard") if len(shape) == 2 else None
        mesh = init_device_mesh(group.device.type, shape, mesh_dim_names=names)
        if mesh.ndim == 1:
            # The same ranks, which are watched already.
            group = replace(
                group_of(mesh.get_group(0), group.device), here=group.here, hosts=group.hosts
            )
    torch_compat.forget_operator_layouts()
    group = replace(group, mesh=mesh, mesh_shape=shape)
    if mesh.ndim == 2:
        group.subgroups = {
            ops.REPLICATE: group_of(mesh.get_group(0), group.device),
            ops.SHARD: group_of(mesh.get_group(1), group.device),
        }
    return group


def groups_like(group: Group, found: Group) -> Group:
    """The group `found` with all that `group` has, on the same mesh; all ranks call this."""
    made = with_mesh(found, group.mesh_shape)
    made.replica_all_reduce, made.check = group.replica_all_reduce, group.check
    for name in group.subgroups:
        if name not in made.subgroups:  # a part of the group that shards
            made.within(int(name.removeprefix(ops.RESHARD)))
    return made


def group_of(process_group: Any, device: torch.device) -> Group:
    """The ranks of an existing `process_group`, which compute on `device`."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    backend = torch_compat.group_backend(process_group, device)
    if backend == "gloo":
        let_threads_finish()
        let_readers_wait()
    by_sends = backend == "gloo" and device.type == "cpu" and 1 < size <= MAX_RANKS
    return Group(
        process_group,
        rank=rank,
        size=size,
        device=device,
        backend=backend,
        timeout=torch_compat.group_timeout(process_group, device),
        pairwise=PairwiseExchange(process_group, rank, size) if by_sends else None,
    )


def _by_node(device: torch.device) -> tuple[int, int]:
    """(nodes, ranks per node), as torch's FSDP1 determines them when it gets no process groups."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local_world_size) if local_world_size.isdecimal() else 0
    if not ranks and device.type == "cuda":
        ranks = torch.cuda.device_count()
    world_size = dist.get_world_size()
    if not ranks or world_size % ranks:
        reason = (
            f"each node has {ranks} of the {world_size}"
            if ranks
            else "the number of ranks per node is not known"
        )
        raise PolicyError(
            "a HYBRID strategy without a mesh shards over the ranks of a node and replicates over "
            f"the nodes, and {reason}; start ranks with torchrun, which sets LOCAL_WORLD_SIZE, or "
            "pass mesh=init_device_mesh(device, (replicas, ranks to shard over))"
        )
    if 1 < world_size == ranks and dist.get_rank() == 0:
        warn_user(
            f"a HYBRID strategy without a mesh replicates over nodes, and all {ranks} ranks are on "
            "one: nothing is replicated, as by the strategy without HYBRID_; pass mesh= for groups "
            "within the node",
        )
    return world_size // ranks, ranks


def _flat(mesh: DeviceMesh) -> Any:
    """The process group of all ranks of `mesh`."""
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    like = mesh.get_group(mesh.ndim - 1)
    return new_process_group(ranks, like, torch.device(mesh.device_type), callers=len(ranks))


def new_process_group(
    ranks: Sequence[int], like: Any, device: torch.device, *, callers: int
) -> Any:
    """Create a process group of global `ranks`, with the backends and the timeout of `like`.

    All of them, this rank among them, call this at the same point; `callers` do in all, each for a
    group that it is in.
    """
    world_size = dist.get_world_size()
    if callers < world_size and torch_compat.is_bound_to_device(dist.group.WORLD):
        raise PolicyError(
            f"a mesh of {callers} of {world_size} ranks needs a group of {len(ranks)} of them. "
            "NCCL would split it off the group of all ranks, which is bound to a device and needs "
            "all of them for that; call init_process_group without device_id, or make the mesh by "
            "init_device_mesh with all ranks and pass a part of it that has one dimension"
        )
    return dist.new_group(
        ranks=list(ranks),
        timeout=torch_compat.group_timeout(like, device),
        backend=dist.get_backend_config(like),
        use_local_synchronization=True,
        group_desc="graphshard",
    )


def _indexed(device: torch.device | str) -> torch.device:
    """`device` with its index, as the `device` of a tensor on it has."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        local_rank = os.environ.get("LOCAL_RANK", "")
        if local_rank.isdecimal() and not torch.cuda.is_initialized():
            torch.cuda.set_device(int(local_rank))  # as a DeviceMesh does, unless the user did
        return torch.device("cuda", torch.cuda.current_device())
    return without_cpu_index(device)


def without_cpu_index(device: torch.device | str) -> torch.device:
    """`device` as a tensor on it has it: there is one CPU, whatever index it is given."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cpu" else device


def hosts_by_rank(group: Group) -> list[str]:
    """A name of each rank's host, in rank order; every rank must call this at the same point."""
    return group.all_gather_object(os.environ.get("NCCL_HOSTID") or _this_host())


def number_of_hosts(group: Group) -> int:
    """The number of hosts of the ranks of `group` that Gloo connects; 1 for other backends."""
    return len(set(hosts_by_rank(group))) if group.backend == "gloo" else 1


def _this_host() -> str:
    """The host's name and, on Linux, its boot and its network, which containers may share."""
    name = [socket.gethostname()]
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists() and network.is_symlink():
        name += [boot.read_text().strip(), str(network.readlink())]
    return " ".join(name)


def group_or_refusal(
    mesh: Any, device: Any, *, alone: torch.device
) -> tuple[Group, GraphshardError | None]:
    """The group that `compile` runs on with these arguments, or the reason why there is none.

    With a reason, the group is that of all ranks there are, to tell them. A rank outside of its
    mesh raises the reason at once, since the others go on.
    """
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        raise PolicyError(
            f"the mesh has ranks {mesh.mesh.flatten().tolist()}, and this is rank "
            f"{dist.get_rank()}; call this on the ranks of the mesh, or make one of all ranks"
        )
    try:
        if isinstance(mesh, str | Sequence):
            mesh = None  # its sizes are those of the plan
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise PolicyError(
                'mesh must be a DeviceMesh, the sizes of one as (2, 4) or "2x4", or None for the '
                f"default process group; got {mesh!r}"
            )
        device = None if device is None else usable_device(device)
        if mesh is None:
            join_launched_ranks()
        return meeting_group(mesh, device, alone=alone), None
    except GraphshardError as error:
        return meeting_group(None, "cpu"), error


def usable_device(device: Any) -> torch.device:
    """`device` as a torch.device that this process can compute on."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PolicyError(
            f'device must be a torch.device or its name, such as "cuda" or "cpu"; got {device!r} '
            f"({reason})"
        ) from None
    if found.type == "meta":
        raise PolicyError(
            "tensors on the meta device have no values, so nothing runs there; leave device= out, "
            "or plan the model without ranks by graphshard.plan"
        )
    if found.type == "cpu":
        return without_cpu_index(found)
    api = getattr(torch, found.type, None)
    count = api.device_count() if api is not None and api.is_available() else 0
    if (found.index or 0) >= count:
        there = f"{count} of them" if count else f"no usable {found.type.upper()} device"
        raise PolicyError(
            f"device={str(found)!r} is not there: torch {torch.__version__} finds {there} on this "
            'machine; pass device="cpu" or leave it out. To see the program for a device that is '
            "elsewhere, use graphshard.plan"
        )
    return found


def join_launched_ranks() -> None:
    """Make the default process group if a launcher started the ranks and nobody made it.

    As torch's `fully_shard`, by `init_process_group()`, so by the environment; the log says so. A
    launcher of one rank gets a group, too, so that one rank has the DTensors that several have.
    """
    ranks = os.environ.get("WORLD_SIZE", "")
    launched = ranks.isdecimal() and int(ranks) > 0
    if not launched or not dist.is_available() or dist.is_initialized():
        return
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if lacking := [name for name in names if name not in os.environ]:
        if int(ranks) == 1:
            return  # some schedulers set it for a single process
        raise PolicyError(
            f"WORLD_SIZE is {ranks} in the environment, there is no process group, and "
            f"{' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} not set to make one; "
            "start the ranks by torchrun, call torch.distributed.init_process_group(...) before "
            "graphshard.compile, or unset WORLD_SIZE for a single process"
        )
    dist.init_process_group()
    logger.info(
        "WORLD_SIZE is %s in the environment and there was no process group, so "
        "graphshard.compile called torch.distributed.init_process_group(); call it yourself to "
        "choose its backend, and destroy_process_group() at the end",
        ranks,
    )
