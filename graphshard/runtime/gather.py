"""Gathering a unit's parameters from their shards, and freeing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from graphshard.planning.layout import ParamLayout
from graphshard.program.packing import MOVABLE
from graphshard.runtime.collectives import Collective, Operand, Pending
from graphshard.runtime.group import Group, as_bytes, strides_of
from graphshard.torch_private import compat as torch_compat


class Gathered(list[Tensor]):
    """What a gather yields: full parameters that can be freed together; None for those taken."""

    __slots__ = ("collective",)

    def __init__(self, tensors: Iterable[Tensor], collective: AllGather) -> None:
        super().__init__(tensors)
        self.collective = collective


def free(gathered: Gathered) -> None:
    """Give back the storage of what a gather yielded."""
    gathered.collective.free(gathered)


# fx prints a call by it: graphshard_free(...).
free.__module__ = "graphshard"


def take(gathered: Gathered, index: int) -> Tensor:
    """One of the parameters, which the gather's list lets go of: it goes with its readers."""
    full = gathered[index]
    gathered[index] = None  # type: ignore[call-overload]
    return full


def release(full: Tensor) -> None:
    """Give back the storage of one of the parameters that a gather yielded."""
    full.untyped_storage().resize_(0)


def poison(full: Tensor) -> None:
    """In checking mode instead: fill it with what shows."""
    full.fill_(_poison(full.dtype))


def leave(full: Tensor) -> None:
    """On a single rank instead: it is the parameter itself, which stays."""


for _kind in (take, release, poison, leave):
    _kind.__module__ = "graphshard"


def releasing(gather: AllGather) -> Callable[[Tensor], None]:
    """What gives back one parameter of what `gather` yields."""
    if gather.group.check:
        return poison
    return leave if isinstance(gather, LocalGather) else release


class AllGather(Collective):
    """Gathers shards `(ceil(d0/W), ...)` into full parameters `(d0, ...)`.

    A shard that was made for it is copied to where it belongs in the full parameter at the launch,
    sent from there, and gone; one that stays anyway is read where it lies.

    A parameter split along another dim is copied out of its buffer at the wait, since the ranks'
    parts of it do not lie one after the other.
    """

    op = "all_gather"

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.launches = self.messages(group.pack_gather_below, lambda o: o.shard_bytes)
        self.options = torch_compat.collective_options("AllgatherOptions")
        self.options.asyncOp = group.side_stream is None
        shapes = [o.layout.gathered_shape for o in self.operands]
        self.shapes = [
            (shape, strides_of(shape), o.dtype)
            for shape, o in zip(shapes, self.operands, strict=True)
        ]
        finish = [_finish(o.layout) for o in self.operands]
        self.finish = [(i, what) for i, what in enumerate(finish) if what is not None]
        alone = {m.indices[0] for launch in self.launches for m in launch if not m.packed}
        self.made = [i for i, o in enumerate(self.operands) if o.made and i in alone]

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Allocate the full buffers and start to fill them."""
        buffers = self.buffers(tensors)
        held = [t for t, o in zip(tensors, self.operands, strict=True) if not o.made]
        pending = Pending(self, held, buffers)
        tensors = self._own(tensors, buffers)
        for messages in self.launches:
            inputs, outputs = [], []
            for message in messages:
                if message.packed:
                    parts = torch_compat.flat_copy([tensors[i] for i in message.indices])
                    whole = parts.new_empty(self.group.size * message.numel)
                    pending.packed.append(whole)
                    inputs.append(parts)
                    outputs.append(whole)
                else:
                    inputs.append(tensors[message.indices[0]])
                    outputs.append(buffers[message.indices[0]])
            if self.group.peers is None:
                self.launch(pending, inputs, outputs)
            else:
                self.send(pending, inputs, outputs)
            pending.operands += inputs
        return pending

    def _own(self, tensors: Sequence[Tensor], buffers: list[Tensor]) -> list[Tensor]:
        """This rank's parts: `tensors`, of those made for this their copies in `buffers`."""
        parts = list(tensors)
        for index in self.made:
            shape = tensors[index].shape
            parts[index] = buffers[index].view(self.group.size, *shape)[self.group.rank]
        if self.made:
            made = [tensors[index] for index in self.made]
            torch._foreach_copy_([parts[index] for index in self.made], made)
        return parts

    def launch(self, pending: Pending, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Start one coalesced gather of `inputs`, of one dtype."""
        launch = self.group.process_group.allgather_into_tensor_coalesced
        if inputs[0].dtype not in MOVABLE:
            outputs, inputs = [as_bytes(t) for t in outputs], [as_bytes(t) for t in inputs]
        self.start(pending, launch, outputs, inputs, self.options)

    def send(self, pending: Pending, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Start to send every rank `inputs`, and to receive its own where they go in `outputs`."""
        size, rank = self.group.size, self.group.rank
        received = [o.view(size, i.numel()).unbind() for i, o in zip(inputs, outputs, strict=True)]
        self.exchange(pending, [(own,) * size for own in inputs], received)
        for own, parts in zip(inputs, received, strict=True):
            if parts[rank].data_ptr() != own.data_ptr():  # in place it is there already
                pending.own.append((parts[rank], own.view(-1)))

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the shards `tensors` are gathered into, in operand order."""
        device = self.group.device
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.shapes
        ]

    def results(self, pending: Pending) -> list[Tensor]:
        """The full parameters: their buffers, prefix views of those where dim 0 was padded."""
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
        for index, finish in self.finish:
            buffers[index] = finish(buffers[index])
        return Gathered(buffers, self)

    def free(self, gathered: Gathered) -> None:
        """Give back the storage, whatever still refers to it.

        In checking mode the storage is filled with NaN (integers: their largest value) and stays
        until nothing refers to it, so that a use after this shows in the numbers.
        """
        for tensor in gathered:
            if tensor is None:  # taken
                continue
            if self.group.check:
                tensor.fill_(_poison(tensor.dtype))
            else:
                tensor.untyped_storage().resize_(0)


class AllGatherInPlace(AllGather):
    """Gathers rows into the buffer they are a part of, which each rank keeps.

    In checking mode the other ranks' rows are poisoned first, so that one not gathered shows.
    """

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The padded buffers, which begin where the storage of the shards does."""
        found = []
        for tensor, (shape, strides, _) in zip(tensors, self.shapes, strict=True):
            buffer = tensor.as_strided(shape, strides, 0)
            if self.group.check:
                own = tensor.clone()
                buffer.fill_(_poison(buffer.dtype))
                tensor.copy_(own)
            found.append(buffer)
        return found


def _finish(layout: ParamLayout) -> Callable[[Tensor], Tensor] | None:
    """What makes the parameter of its gathered buffer; None if it is that."""
    dim, shape = layout.dim, layout.shape
    if dim:

        def in_order(buffer: Tensor) -> Tensor:
            full = buffer.unflatten(0, (layout.world_size, -1)).movedim(0, dim).reshape(shape)
            # Whatever still refers to the buffer (Gloo's views of its parts) lets go of it.
            if full.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                buffer.untyped_storage().resize_(0)
            return full

        return in_order
    if layout.gathered_shape != shape:
        return lambda buffer: buffer.narrow(0, 0, shape[0])
    return None


class LocalGather(AllGather):
    """On a single rank the shard is the parameter: nothing moves, nothing may be freed."""

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """The shards themselves, or copies that can be poisoned."""
        return Pending(
            self, [], [t.clone() for t in tensors] if self.group.check else list(tensors)
        )

    def results(self, pending: Pending) -> list[Tensor]:
        """The full parameters."""
        return Gathered(pending.buffers, self)

    def free(self, gathered: Gathered) -> None:
        """Poison copies; the parameter's own storage stays."""
        if self.group.check:
            super().free(gathered)


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


class Reshard:
    """Copies this rank's part of k, `(ceil(d0/k), ...)`, out of a full parameter `(d0, ...)`.

    Of one split along another dim, the part along that.

    Args:
        layout: of the parameter on the `k` ranks.
        group: those ranks.
    """

    def __init__(self, layout: ParamLayout, group: Group) -> None:
        self.layout = layout
        self.rows = layout.rows(group.rank)
        # fx prints a call by these.
        self.__name__ = self.__qualname__ = "reshard"
        self.__module__ = "graphshard"

    def __call__(self, full: Tensor) -> Tensor:
        """A contiguous copy; zeros where the parameter ends before its part does."""
        start, stop = self.rows
        rows = full.narrow(self.layout.dim, start, stop - start)
        if stop - start == self.layout.padded_rows:
            return rows.clone(memory_format=torch.contiguous_format)
        part = full.new_zeros(self.layout.shard_shape)  # padded along dim 0 only
        part[: stop - start] = rows
        return part
