"""The parameters and buffers of a sharded module, as places that values are read from and put in.

What a rank owns of a parameter is taken from its DTensor, so any mesh, any sharded dim, and tensors
that are not sharded at all go the same way.
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
"""Values are read and sent in pieces of this many bytes, and at least one row."""


class Slot:
    """A parameter or buffer.

    Args:
        names: all its names; several if it is tied.
        tensor: what the module holds.
        shard: of a sharded parameter.
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
    def described(self) -> str:
        """What messages call it."""
        return f"{'parameter' if self.is_param else 'buffer'} {self.name!r}"

    @property
    def local(self) -> Tensor:
        """What this rank stores of it, itself."""
        return local_of(self.tensor)

    @cached_property
    def region(self) -> Region:
        """The part of the whole that is."""
        return region_of(self.tensor)

    def put(self, part: Tensor, where: Region) -> None:
        """Take over what this rank owns of `part`, the values of the whole at `where`."""
        put(self.local, self.region, part, where)

    def filled(self) -> None:
        """Note that it has values now."""
        if self.shard is not None:
            self.shard.note_values()


def slots_of(module: nn.Module, bindings: Bindings) -> list[Slot]:
    """Every parameter and buffer of `module` once, in its order.

    Raises:
        RuntimeStateError: a parameter was replaced by one of another layout, or is unsharded.
    """
    state = vars(module).get("_graphshard")
    if state is not None and state.unsharded.open:
        raise RuntimeStateError(
            "the module has no shards to read or write inside of unsharded(); leave it first"
        )
    for shard in distinct(bindings.shards):
        shard.current()  # adopts a parameter that the user put in place of ours
    persistent = set(module.state_dict(keep_vars=True))
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [
        Slot(
            tuple(names),
            tensor,
            bindings.shards.get(names[0]),
            persistent=any(name in persistent for name in names),
        )
        for tensor, names in found.values()
    ]


def by_name(slots: Sequence[Slot]) -> dict[str, Slot]:
    """Slots under all their names."""
    return {name: slot for slot in slots for name in slot.names}


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, or itself if it is plain; shares its memory."""
    return torch_compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def region_of(tensor: Tensor) -> Region:
    """Which part of the whole this rank has of `tensor`."""
    if isinstance(tensor, DTensor):
        return torch_compat.owned_region(tensor)
    return tuple(slice(0, size) for size in tensor.shape)


def put(local: Tensor, region: Region, part: Tensor, where: Region) -> None:
    """Copy what `part`, the values of a whole at `where`, has for `local`, its `region`."""
    mine, theirs = [], []
    for own, given in zip(region, where, strict=True):
        start, stop = max(own.start, given.start), min(own.stop, given.stop)
        if start >= stop:
            return
        mine.append(slice(start - own.start, stop - own.start))
        theirs.append(slice(start - given.start, stop - given.start))
    with torch.no_grad():
        local[tuple(mine)].copy_(part[tuple(theirs)])


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """The whole of `tensor` in memory of its own, on the group's device; every rank calls this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    local = local_of(tensor).detach().to(group.device)
    if tensor.numel() == 0 or all(p.is_replicate() for p in tensor.placements):
        return local.clone()
    if tensor.dtype in MOVABLE:
        return torch_compat.dtensor_like(tensor, local).full_tensor()
    # As bytes, a dim at the end, so that the split of the others stays as it is.
    size = tensor.itemsize
    shape = torch.Size((*tensor.shape, size))
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    raw = local.contiguous().unsqueeze(-1).view(torch.uint8)
    whole = DTensor.from_local(
        raw, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return whole.view(tensor.dtype).squeeze(-1)


def pieces(region: Region, itemsize: int) -> Iterator[Region]:
    """`region` in parts of whole rows, each of about `PIECE_BYTES`."""
    if not region:
        yield region
        return
    rows, others = region[0], region[1:]
    row_bytes = itemsize * prod(part.stop - part.start for part in others)
    step = max(1, PIECE_BYTES // max(row_bytes, 1))
    for first in range(rows.start, rows.stop, step):
        yield (slice(first, min(first + step, rows.stop)), *others)


def agree(group: Group, problem: str | None) -> None:
    """Return once every rank is here and none has a problem.

    Raises:
        CheckpointError: on every rank, if one has; the first of them.
    """
    found = first_problem(group, everyones(group, problem))
    if found is not None:
        raise CheckpointError(found)


def everyones(group: Group, value: Any) -> list[Any]:
    """The `value` of every rank; a "fake" group has only this one."""
    return [value] * group.size if group.backend == "fake" else group.everyones(value)


def first_problem(group: Group, problems: Sequence[str | None]) -> str | None:
    """The first of the ranks' problems, with the rank if there are several."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            everywhere = group.size == 1 or all(other == problem for other in problems)
            return problem if everywhere else f"{problem} (on rank {rank})"
    return None


def kind(dtype: torch.dtype) -> str:
    """Which numbers a dtype holds; values go from one dtype to another only within a kind."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating point"
    return "boolean" if dtype is torch.bool else "integer"
