"""The parameters and buffers of a sharded module, as sources and targets of their values.

A rank's region of a parameter follows from its DTensor, so any mesh, any sharded dim and unsharded
tensors are handled alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError, RuntimeStateError
from graphshard.program.packing import MOVABLE
from graphshard.runtime.group import Group
from graphshard.runtime.lowered import Bindings
from graphshard.runtime.shards import Shard, distinct
from graphshard.state.raw import Region
from graphshard.torch_private import compat as torch_compat

PIECE_BYTES = 32 * 1024 * 1024
"""Values are read and sent in pieces of about this many bytes, and of at least one row."""


class StateTensor:
    """A parameter or buffer of a sharded module.

    Args:
        names: all its names; several if it is tied.
        tensor: the module's tensor; a DTensor if it is sharded.
        shard: the shard of a sharded parameter; None for other tensors.
        persistent: whether it is in the state dict.
    """

    def __init__(
        self, names: tuple[str, ...], tensor: Tensor, shard: Shard | None, *, persistent: bool
    ) -> None:
        self.names = names
        self.tensor = tensor
        self.shard = shard
        self.persistent = persistent
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.is_param = isinstance(tensor, nn.Parameter)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def label(self) -> str:
        """The text for messages: "parameter 'weight'" or "buffer 'mean'"."""
        return f"{'parameter' if self.is_param else 'buffer'} {self.name!r}"

    @property
    def local(self) -> Tensor:
        """The memory that this rank stores of it."""
        return local_of(self.tensor)

    @cached_property
    def region(self) -> Region:
        """The region of the full tensor that this rank stores."""
        return region_of(self.tensor)

    def write(self, values: Tensor, region: Region) -> None:
        """Write this rank's part of `values`, which fill `region` of the full tensor."""
        copy_overlap(self.local, self.region, values, region)

    def mark_filled(self) -> None:
        """Record that it has values."""
        if self.shard is not None:
            self.shard.note_values()


def state_tensors_of(module: nn.Module, bindings: Bindings) -> list[StateTensor]:
    """Return every parameter and buffer of `module` once, in module order.

    Raises:
        RuntimeStateError: a parameter was replaced by one of another layout, or is unsharded.
    """
    state = vars(module).get("_graphshard")
    if state is not None and state.unsharded.open:
        raise RuntimeStateError(
            "the module has no shards to read or write inside of unsharded(); leave it first"
        )
    for shard in distinct(bindings.shards):
        shard.current()  # adopts a parameter that the user replaced
    persistent = set(module.state_dict(keep_vars=True))
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            tensors.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [
        StateTensor(
            tuple(names),
            tensor,
            bindings.shards.get(names[0]),
            persistent=any(name in persistent for name in names),
        )
        for tensor, names in tensors.values()
    ]


def by_name(state_tensors: Sequence[StateTensor]) -> dict[str, StateTensor]:
    """Map every name to its `StateTensor`."""
    return {name: state_tensor for state_tensor in state_tensors for name in state_tensor.names}


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself; memory is shared."""
    return torch_compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def region_of(tensor: Tensor) -> Region:
    """Return the region of the full tensor that this rank stores of `tensor`."""
    if isinstance(tensor, DTensor):
        return torch_compat.owned_region(tensor)
    return tuple(slice(0, size) for size in tensor.shape)


def copy_overlap(target: Tensor, target_region: Region, source: Tensor, region: Region) -> None:
    """Copy from `source` to `target` where their regions of the same full tensor overlap."""
    into, of = [], []
    for a, b in zip(target_region, region, strict=True):
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start >= stop:
            return
        into.append(slice(start - a.start, stop - a.start))
        of.append(slice(start - b.start, stop - b.start))
    with torch.no_grad():
        target[tuple(into)].copy_(source[tuple(of)])


def gather_full(tensor: Tensor, group: Group) -> Tensor:
    """Return the full tensor in new memory on the group's device; every rank must call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    local = local_of(tensor).detach().to(group.device)
    if tensor.numel() == 0 or all(p.is_replicate() for p in tensor.placements):
        return local.clone()
    if tensor.dtype in MOVABLE:
        return torch_compat.dtensor_like(tensor, local).full_tensor()
    # Gather bytes, as a last dim, so that the other dims stay split as they are.
    size = tensor.itemsize
    shape = torch.Size((*tensor.shape, size))
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    raw = local.contiguous().unsqueeze(-1).view(torch.uint8)
    full = DTensor.from_local(
        raw, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return full.view(tensor.dtype).squeeze(-1)


def split_region(region: Region, itemsize: int) -> Iterator[Region]:
    """Yield `region` in pieces of whole rows, each of about `PIECE_BYTES`."""
    if not region:
        yield region
        return
    rows, others = region[0], region[1:]
    row_bytes = itemsize * prod(dim.stop - dim.start for dim in others)
    step = max(1, PIECE_BYTES // max(row_bytes, 1))
    for first in range(rows.start, rows.stop, step):
        yield (slice(first, min(first + step, rows.stop)), *others)


def raise_together(group: Group, problem: str | None) -> None:
    """Wait for every rank, and raise on all of them if one has a problem.

    Raises:
        CheckpointError: with the first rank's problem.
    """
    first = first_problem(group, all_gather_objects(group, problem))
    if first is not None:
        raise CheckpointError(first)


def uses_rank_zero(group: Group, empty: bool, problem: str | None, if_empty: str) -> bool:
    """Decide on all ranks whether to load from every rank's own values or from rank 0's alone.

    Args:
        group: the ranks; all of them must call this.
        empty: whether this rank has no values.
        problem: why this rank's values cannot be loaded, or None.
        if_empty: the problem of a rank without values, unless only rank 0 has values.

    Returns:
        True if only rank 0 has values; it then sends them to the others.

    Raises:
        CheckpointError: on every rank, with the first problem of a rank that is loaded from.
    """
    reports = all_gather_objects(group, (empty, problem))
    empty_ranks = [rank for rank, (is_empty, _) in enumerate(reports) if is_empty]
    from_first = group.size > 1 and len(empty_ranks) == group.size - 1 and 0 not in empty_ranks
    problems = [reported for _, reported in reports]
    if empty_ranks and not from_first and not any(problems):
        problems[empty_ranks[0]] = if_empty
    first = first_problem(group, problems[:1] if from_first else problems)
    if first is not None:
        raise CheckpointError(first)
    return from_first


def all_gather_objects(group: Group, value: Any) -> list[Any]:
    """Return the `value` of every rank; with a "fake" group, this rank's for each."""
    return [value] * group.size if group.backend == "fake" else group.everyones(value)


def first_problem(group: Group, problems: Sequence[str | None]) -> str | None:
    """Return the first of the ranks' problems, naming the rank unless all have the same."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            everywhere = group.size == 1 or all(other == problem for other in problems)
            return problem if everywhere else f"{problem} (on rank {rank})"
    return None


def dtype_kind(dtype: torch.dtype) -> str:
    """Return the kind of numbers of `dtype`; values are cast only within a kind."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "boolean" if dtype is torch.bool else "integer"
