"""Gathering a unit's parameters from their shards, and freeing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphshard.planning.layout import ParamLayout
from graphshard.program.packing import GATHER_BELOW, MOVABLE
from graphshard.program.sizes import contiguous_strides
from graphshard.runtime.collectives import (
    BoundCollective,
    Message,
    Operand,
    Pending,
    poison_of,
)
from graphshard.runtime.group import Group, as_bytes
from graphshard.runtime.shards import part_of, put_together, without_padding
from graphshard.runtime.streams import Copy
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.coalesced import coalesced


class Gathered(list[Tensor]):
    """Full parameters `(d0, ...)` that a gather returns and `free` frees; None for taken ones."""

    __slots__ = ("collective",)

    def __init__(self, tensors: Iterable[Tensor], collective: AllGather) -> None:
        super().__init__(tensors)
        self.collective = collective


def free(gathered: Gathered) -> None:
    """Give back the storage of all parameters that a gather returned, as `release_for` says.

    Tensors may still refer to it. In checking mode it is filled with NaN instead (integers: their
    largest value) and stays until nothing refers to it, so that a later use shows in the results.
    """
    let_go = release_for(gathered.collective, copied=False)
    for tensor in gathered:
        if tensor is not None:  # else taken
            let_go(tensor)


# fx prints a call by it: graphshard_free(...).
free.__module__ = "graphshard"


def take(gathered: Gathered, index: int) -> Tensor:
    """Take parameter `index` out of the gather's list, so that its last reader frees it."""
    full = gathered[index]
    gathered[index] = None  # type: ignore[call-overload]
    return full


def release(full: Tensor) -> None:
    """Give back the storage of one parameter that a gather returned."""
    full.untyped_storage().resize_(0)


def poison(full: Tensor) -> None:
    """Fill a released parameter with NaN or the like: `release` in checking mode."""
    full.fill_(poison_of(full.dtype))


def leave(full: Tensor) -> None:
    """Do nothing: `release` on a single rank of what it stores, which is the parameter itself."""


for _kind in (take, release, poison, leave):
    _kind.__module__ = "graphshard"


def release_for(gather: AllGather, *, copied: bool) -> Callable[[Tensor], None]:
    """The function that releases one parameter that `gather` returned.

    copied: whether the shard is a copy for this gather alone: in another dtype, or from the host.
    """
    if gather.group.check:
        return poison
    return leave if isinstance(gather, LocalGather) and not copied else release


Copies = list[tuple[Tensor, Tensor]]
"""(Target, source) pairs, yet to be copied: shards to where they are sent from, perhaps cast."""


def _copy_all(copies: Copies) -> None:
    """Make `copies`, and empty the list; those between the same two dtypes are one launch."""
    by_dtypes: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in copies:
        targets, sources = by_dtypes.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    copies.clear()
    for targets, sources in by_dtypes.values():
        torch._foreach_copy_(targets, sources)


def _copy_and_launch(copies: Copies, launch: Callable[..., Any], *args: Any) -> Any:
    _copy_all(copies)
    return launch(*args)


class AllGather(BoundCollective):
    """Gathers shards `(ceil(d0/W), ...)` into full parameters `(d0, ...)`, in the operands' dtypes.

    A temporary shard is copied to its place in the full parameter at the launch and sent from
    there, so that its memory is given back at once. A shard in another dtype is cast to its place,
    all of them in one launch on the side stream. Other shards are read where they lie.

    A parameter not split along dim 0 is copied out of its buffer at the wait, since the buffer
    holds the ranks' shards one after the other.
    """

    op = "all_gather"

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.launches = self.messages(GATHER_BELOW.get(group.backend, 0))
        self.options = torch_compat.collective_options("AllgatherOptions")
        self.options.asyncOp = group.side_stream is None
        shapes = [o.layout.gathered_shape for o in self.operands]
        self.shapes = [
            (shape, contiguous_strides(shape), o.dtype)
            for shape, o in zip(shapes, self.operands, strict=True)
        ]
        layouts = [operand.layout for operand in self.operands]
        self.padded = [
            (i, one.shape[0])
            for i, one in enumerate(layouts)
            if one.is_prefix and one.gathered_shape != one.shape
        ]
        self.apart = [(i, one) for i, one in enumerate(layouts) if not one.is_prefix]
        unpacked = {m.indices[0] for launch in self.launches for m in launch if not m.packed}
        self.temporary = [i for i, o in enumerate(self.operands) if o.temporary and i in unpacked]
        self.cast = [i for i, o in enumerate(self.operands) if o.casts and i in unpacked]

    def __call__(self, given: Sequence[Tensor | Copy]) -> Pending:
        """Allocate the full buffers and start to gather the shards `given` into them.

        The side stream waits for shards that are on their way from the host; compute does not.
        """
        arriving = [shard for shard in given if isinstance(shard, Copy)]
        side_stream = self.group.side_stream
        tensors = [t.hand_to(side_stream) if isinstance(t, Copy) else t for t in given]
        buffers = self.buffers(tensors)
        lasting = [
            t for t, o in zip(tensors, self.operands, strict=True) if arriving or not o.temporary
        ]
        pending = Pending(self, lasting, buffers)
        pending.arriving = arriving
        shards = self._placed(tensors, buffers)
        copies = [(shards[i], tensors[i]) for i in self.cast]
        for messages in self.launches:
            inputs, outputs = [], []
            for message in messages:
                if message.packed:
                    flat = self._flat(shards, message, copies, at_once=not arriving)
                    gathered = flat.new_empty(self.group.size * message.numel)
                    pending.packed.append(gathered)
                    inputs.append(flat)
                    outputs.append(gathered)
                else:
                    inputs.append(shards[message.indices[0]])
                    outputs.append(buffers[message.indices[0]])
            if side_stream is None:
                _copy_all(copies)
            if self.group.pairwise is None:
                self.launch(pending, inputs, outputs, copies)
            else:
                size, rank = self.group.size, self.group.rank
                pairs = zip(inputs, outputs, strict=True)
                received = [o.view(size, i.numel()).unbind() for i, o in pairs]
                self.exchange(pending, [(shard,) * size for shard in inputs], received)
                for shard, by_rank in zip(inputs, received, strict=True):
                    if by_rank[rank].data_ptr() != shard.data_ptr():  # else copied there already
                        pending.copies.append((by_rank[rank], shard.view(-1)))
            pending.operands += inputs
        return pending

    def _placed(self, tensors: Sequence[Tensor], buffers: list[Tensor]) -> list[Tensor]:
        """The shards to send: `tensors`, or the places in `buffers` of those that are copied.

        Temporary ones are there already; others are still to be cast.
        """
        shards = list(tensors)
        for index in (*self.temporary, *self.cast):
            shape = tensors[index].shape
            shards[index] = buffers[index].view(self.group.size, *shape)[self.group.rank]
        if self.temporary:
            sources = [tensors[index] for index in self.temporary]
            torch._foreach_copy_([shards[index] for index in self.temporary], sources)
        return shards

    def _flat(
        self, shards: Sequence[Tensor], message: Message, copies: Copies, *, at_once: bool
    ) -> Tensor:
        """The shards of a packed message as one tensor; `copies` gets those yet to be made."""
        parts = [shards[i] for i in message.indices]
        dtype = self.operands[message.indices[0]].dtype
        if at_once and all(part.dtype == dtype for part in parts):
            return torch_compat.flat_copy(parts)
        flat = torch.empty(message.numel, dtype=dtype, device=self.group.device)
        places = flat.split_with_sizes(message.numels)
        copies += [(p.view(t.shape), t) for p, t in zip(places, parts, strict=True)]
        return flat

    def launch(
        self, pending: Pending, inputs: list[Tensor], outputs: list[Tensor], copies: Copies
    ) -> None:
        """Start one gather of all `inputs`, of one dtype, behind what is left of `copies`."""
        group = self.group
        gather = coalesced(group.process_group, "allgather_into_tensor_coalesced", group.backend)

        launch = partial(_copy_and_launch, copies, gather)
        if inputs[0].dtype not in MOVABLE:
            outputs, inputs = [as_bytes(t) for t in outputs], [as_bytes(t) for t in inputs]
        self.start(pending, launch, outputs, inputs, self.options)

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The buffers that the shards `tensors` are gathered into, in operand order."""
        device = self.group.device
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.shapes
        ]

    def results(self, pending: Pending) -> list[Tensor]:
        """The full parameters `(d0, ...)`: their buffers, or prefix views of padded ones."""
        buffers = pending.buffers
        packed = iter(pending.packed)
        for messages in self.launches:
            for message in messages:
                if message.packed:
                    by_rank = next(packed).view(self.group.size, -1)
                    torch.split_with_sizes_copy(
                        by_rank,
                        message.numels,
                        dim=1,
                        out=[buffers[i].view(self.group.size, -1) for i in message.indices],
                    )
        for index, rows in self.padded:
            buffers[index] = buffers[index].narrow(0, 0, rows)
        for index, layout in self.apart:
            buffer = buffers[index]
            whole = self.whole(index, pending)
            put_together(buffer.view(layout.world_size, -1), whole, layout)
            buffer.untyped_storage().resize_(0)  # Gloo's views of it may still refer to it
            buffers[index] = whole
        return Gathered(buffers, self)

    def whole(self, index: int, pending: Pending) -> Tensor:
        """Memory for parameter `index`, whose parts are copied out of its buffer."""
        operand = self.operands[index]
        return pending.buffers[index].new_empty(operand.layout.shape)


class AllGatherInPlace(AllGather):
    """Gathers rows into a resident parameter's buffer, of which this rank's rows are a view.

    One that is not split along dim 0 is gathered elsewhere, and copied there. In checking mode the
    other ranks' rows are poisoned first, so that a missing row shows.
    """

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The padded buffers, which begin where the storages of the shards begin."""
        buffers = []
        apart = {index for index, _ in self.apart}
        for index, (tensor, (shape, strides, _)) in enumerate(
            zip(tensors, self.shapes, strict=True)
        ):
            if index in apart:
                buffers.append(tensor.new_empty(shape))
                continue
            buffer = tensor.as_strided(shape, strides, 0)
            if self.group.check:
                rows = tensor.clone()
                buffer.fill_(poison_of(buffer.dtype))
                tensor.copy_(rows)
            buffers.append(buffer)
        return buffers

    def whole(self, index: int, pending: Pending) -> Tensor:
        """The resident parameter, at the beginning of the memory that has the shard."""
        shape = self.operands[index].layout.shape
        return pending.operands[index].as_strided(shape, contiguous_strides(shape), 0)


class LocalGather(AllGather):
    """The gather on a single rank: the shard is the parameter, and must not be freed."""

    def __call__(self, given: Sequence[Tensor | Copy]) -> Pending:
        """Take the shards themselves, or in checking mode copies that can be poisoned."""
        shards = [t.arrive() if isinstance(t, Copy) else t for t in given]
        return Pending(self, [], [t.clone() for t in shards] if self.group.check else shards)

    def results(self, pending: Pending) -> list[Tensor]:
        """The full parameters, in operand order."""
        return Gathered(pending.buffers, self)


class Reshard:
    """Copies this rank's shard on k ranks out of a full parameter `(d0, ...)`.

    layout: the parameter's on those ranks, which are `group`.
    """

    def __init__(self, layout: ParamLayout, group: Group) -> None:
        self.layout = layout
        self.rank = group.rank
        self.part_shape = layout.part_shape(group.rank)
        # fx prints a call by these.
        self.__name__ = self.__qualname__ = "reshard"
        self.__module__ = "graphshard"

    def __call__(self, full: Tensor) -> Tensor:
        """A contiguous copy of the shard; zeros behind the end of the part."""
        part = part_of(full, self.layout, self.rank)
        if self.part_shape == self.layout.shard_shape:
            return part.clone(memory_format=torch.contiguous_format)
        shard = full.new_zeros(self.layout.shard_shape)
        without_padding(shard, self.part_shape).copy_(part)
        return shard
