"""The parameters and buffers of a sharded module, as sources and targets of their values.

A rank's region of a parameter follows from its DTensor, so any mesh, any sharded dim and unsharded
tensors are handled alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError, RuntimeStateError
from graphshard.program.packing import MOVABLE
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import Group
from graphshard.runtime.lower import Bindings
from graphshard.runtime.shards import Shard, distinct
from graphshard.state.files import Region
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.dtensors import full_tensor

PIECE_BYTES = 32 * 1024 * 1024
"""Values are read and sent in pieces of about this many bytes, and of at least one row."""


class StateTensor:
    """A parameter or buffer of a sharded module, under all its names (several if it is tied).

    `tensor` is the module's, a DTensor if it is sharded; `persistent` tells whether the state dict
    has it.
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

    @property
    def whole(self) -> Region:
        """The region of all of it."""
        return tuple(slice(0, size) for size in self.shape)

    def write(self, values: Tensor, region: Region) -> None:
        """Write this rank's part of `values`, which fill `region` of the full tensor."""
        copy_overlap(self.local, self.region, values, region)
        self._note_values()

    def place(self) -> Tensor:
        """Memory to read this rank's part into: its own, if it has no values yet, or new."""
        if self.shard is not None and not self.shard.has_values():
            return self.local
        return torch.empty_like(self.local, device="cpu")

    def take(self, values: Tensor) -> None:
        """Take over this rank's part, which may have been read into `place()`."""
        with torch.no_grad():
            if values is not self.local:
                self.local.copy_(values)
        self._note_values()

    def leave(self, values: Tensor) -> None:
        """Be as before `place()`, whose memory may have been written."""
        if values.data_ptr() == self.local.data_ptr():
            with torch.no_grad():
                self.local.fill_(float("nan"))  # see `Shard.has_values`

    def receive(
        self, into: Tensor, group: Group, dtype: torch.dtype, read: Callable[[Region], Any]
    ) -> None:
        """Put this rank's part of what rank 0 sends in pieces `into` memory; all ranks call this.

        `read` gives each piece on rank 0; what it gives elsewhere is ignored.
        """
        for piece in split_region(self.whole, dtype.itemsize):
            value = read(piece)
            sizes = [rows.stop - rows.start for rows in piece]
            copy_overlap(into, self.region, group.broadcast(value, sizes, dtype), piece)

    def _note_values(self) -> None:
        if self.shard is not None:
            self.shard.note_values()


def state_tensors_of(module: nn.Module, bindings: Bindings) -> list[StateTensor]:
    """Return every parameter and buffer of `module` once, in module order."""
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


def memory_like(tensor: Tensor) -> Tensor:
    """Return new CPU memory for this rank's part of `tensor`, laid out alike."""
    local = torch.empty_like(local_of(tensor), device="cpu")
    return torch_compat.dtensor_like(tensor, local) if isinstance(tensor, DTensor) else local


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
    split = (
        not placement.is_replicate() and tensor.device_mesh.size(dim) > 1
        for dim, placement in enumerate(tensor.placements)
    )
    if not any(split):  # full_tensor() of one that is whole shares memory
        return local.clone()
    if tensor.numel() == 0:
        return local.new_empty(tensor.shape)
    if tensor.dtype in MOVABLE:
        return full_tensor(torch_compat.dtensor_like(tensor, local))
    # Gather bytes, as a last dim, so that the other dims stay split as they are.
    size = tensor.itemsize
    shape = torch.Size((*tensor.shape, size))
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    raw = local.contiguous().unsqueeze(-1).view(torch.uint8)
    as_bytes = DTensor.from_local(
        raw, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return full_tensor(as_bytes).view(tensor.dtype).squeeze(-1)


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


def gathered_line(name: str, tensor: Tensor) -> str:
    """The text for ranks to compare before they call `gather_full(tensor)`."""
    return f"{name} {list(tensor.shape)} {str(tensor.dtype)[6:]}"


class Keeper:
    """Keeps what is made of gathered tensors; its first error is told once all are gathered."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def keep(self, make: Callable[[], Any]) -> Any:
        """What `make` returns; None if it failed, now or before."""
        if not self._errors:
            try:
                return make()
            except Exception as error:
                self._errors.append(error)
        return None

    def end(self, agreement: Agreement) -> None:
        """Meet all ranks; raises on all of them if `make` failed on one."""
        with agreement.part():
            if self._errors:
                raise self._errors.pop()  # not to be held by this, which it refers to


def only_rank_zero(agreement: Agreement, empty: Sequence[bool], if_empty: str) -> bool:
    """Decide on all ranks whether to load from every rank's own values or from rank 0's alone.

    `empty` says by rank whether it has no values. True if only rank 0 has values, which it then
    sends to the others; in any other case ranks without values are an error, `if_empty`.
    """
    ranks = [rank for rank, is_empty in enumerate(empty) if is_empty]
    if not ranks:
        return False
    if 0 not in ranks and len(ranks) == len(empty) - 1:
        return True
    where = "" if len(ranks) == len(empty) else f" (on rank {ranks[0]})"
    with agreement.part():
        raise CheckpointError(f"{if_empty}{where}")
    return False


def dtype_kind(dtype: torch.dtype) -> str:
    """Return the kind of numbers of `dtype`; values are cast only within a kind."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "boolean" if dtype is torch.bool else "integer"
