"""Whole parameters from the ranks' shards, outside of programs.

A parameter split along dim 0 is received where it stays, so that gathering it takes its own bytes
and no more. One split along other dims is received in pieces of rows. Small parameters are packed
into one message, from which each is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.runtime.gloo import alias_tensors, empty_aliases
from graphshard.runtime.group import Group, as_bytes, movable
from graphshard.runtime.shards import Shard, put_together
from graphshard.torch_private.coalesced import coalesced

_ALIGNED = 16
"""Bytes to whose multiples the parts of a packed message are padded."""

_PACK_BELOW, _MESSAGE = 64 * 1024, 4 * 1024 * 1024
"""Parts of fewer bytes are packed, into messages of about as many bytes in all."""

_PIECES = 16
"""A parameter of which dim 0 is not split is received in about this many pieces."""


@dataclass(frozen=True)
class Wanted:
    """A parameter to be gathered in `dtype`; or its gradient, of which this rank has `grad`."""

    shard: Shard
    dtype: torch.dtype
    grad: Tensor | None = None

    @property
    def is_split(self) -> bool:
        """Whether several ranks hold parts of it."""
        return self.shard.layout.sharded and self.shard.layout.world_size > 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter, padding included."""
        return prod(self.shard.layout.gathered_shape) * self.dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's part, as it is sent."""
        return self.shard.layout.shard_numel * self.dtype.itemsize

    @property
    def peak(self) -> int:
        """The most bytes in use while `gather` runs, the result included."""
        if not self.is_split:
            return self.nbytes
        layout = self.shard.layout
        copied = not self._is_as_wanted
        sent = self.sent_bytes if copied else 0
        if layout.is_prefix:
            return self.nbytes + sent
        piece = self.nbytes // max(layout.shape[0], 1) * self._piece_rows
        return self.nbytes + sent + piece + piece // layout.world_size

    @property
    def copied_bytes(self) -> int:
        """Bytes that copying it out of a packed message takes, the result included."""
        return self.nbytes if self.shard.layout.is_prefix else 2 * self.nbytes

    @property
    def _piece_rows(self) -> int:
        """Rows of a piece: a few, or all if the rows themselves are split."""
        rows, *_ = shape = self.shard.layout.shape
        return rows if self.shard.layout.shard_shape[0] < rows else max(1, shape[0] // _PIECES)

    @property
    def is_there(self) -> bool:
        """Whether this rank stores what is wanted, as it is wanted."""
        return not self.is_split and self._is_as_wanted

    @property
    def _is_as_wanted(self) -> bool:
        local = self.shard.local if self.grad is None else self.grad
        return local.dtype == self.dtype and local.device == self.shard.group.device

    def own(self) -> Tensor:
        """This rank's part as it is stored, with padding."""
        if self.grad is None:
            return self.shard.current().detach()
        return self.shard.with_padding(self.grad.detach())

    def gather(self) -> Tensor:
        """The whole parameter `(d0, ...)` in new memory, on the device of the group.

        All ranks of the shard group must call this.
        """
        layout, group = self.shard.layout, self.shard.group.shard
        if not self.is_split:
            return self.own().to(self.shard.group.device, self.dtype, copy=True)
        sent = self._sent()
        if layout.is_prefix:
            gathered = sent.new_empty(layout.gathered_shape)
            gather_flat(group, sent, gathered)
            return gathered[: layout.shape[0]]
        whole = sent.new_empty(layout.shape)
        for start in range(0, layout.shape[0], max(1, self._piece_rows)):
            rows = whole[start : start + self._piece_rows]
            piece = replace(layout, shape=tuple(rows.shape))
            received = sent.new_empty((group.size, piece.shard_numel))
            # The rows of this rank's part begin where as many rows of it end.
            first = start * prod(self.shard.part_shape[1:])
            gather_flat(group, sent.view(-1)[first:][: piece.shard_numel], received)
            put_together(received, rows, piece)
        return whole

    def _sent(self) -> Tensor:
        device = self.shard.group.device
        return self.own().to(device, self.dtype).contiguous()

    def unpacked(self, received: Tensor) -> Tensor:
        """The whole parameter, copied from the parts of all ranks `(ranks, bytes)`."""
        layout = self.shard.layout
        parts = received.contiguous().view(-1).view(self.dtype)
        if layout.is_prefix:
            return parts.view(layout.gathered_shape)[: layout.shape[0]]
        whole = parts.new_empty(layout.shape)
        return put_together(parts.view(received.shape[0], -1), whole, layout)


class Packed:
    """Several split parameters of one group, in one message.

    Made by a collective; then each is copied out of the message by `whole`.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        group = wanted[0].shard.group.shard
        self._places: list[tuple[int, int]] = []
        end = 0
        for each in wanted:
            self._places.append((end, end + each.sent_bytes))
            end += padded(each.sent_bytes)
        sent = torch.zeros(end, dtype=torch.uint8, device=group.device)
        for each, (start, stop) in zip(wanted, self._places, strict=True):
            if stop > start:
                sent[start:stop].copy_(as_bytes(each._sent()))
        self._received = sent.new_empty((group.size, end))
        gather_flat(group, sent, self._received)
        self._wanted = tuple(wanted)

    def whole(self, index: int) -> Tensor:
        """The whole parameter of this index, in memory of its own."""
        start, stop = self._places[index]
        return self._wanted[index].unpacked(self._received[:, start:stop].clone())


def gather_each(wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, Tensor]]:
    """Gather parameters, small ones together; what is there already shares memory with the shard.

    All ranks must call this with the same parameters.
    """
    small: list[Wanted] = []
    room = 0
    for each in wanted:
        if each.is_there:
            yield each, each.own()
        elif each.is_split and each.sent_bytes < _PACK_BELOW:
            if small and each.nbytes > room:
                yield from _from_one_message(small)
                small = []
            room = (room if small else _MESSAGE) - each.nbytes
            small.append(each)
        else:
            yield each, each.gather()
    yield from _from_one_message(small)


def _from_one_message(wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, Tensor]]:
    packed = Packed(wanted) if wanted else None
    for index, each in enumerate(wanted):
        assert packed is not None
        yield each, packed.whole(index)


def padded(nbytes: int) -> int:
    """Bytes that a part of a packed message takes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def gather_flat(group: Group, sent: Tensor, received: Tensor) -> None:
    """Put the `sent` of every rank one after another into `received`; both are contiguous.

    Without the copies that Gloo's own all_gather makes.
    """
    if sent.numel() == 0:
        return
    if group.pairwise is None and group.backend != "gloo":
        gather = coalesced(group.process_group, "allgather_into_tensor_coalesced", group.backend)
        gather([movable(received).view(-1)], [movable(sent).view(-1)]).wait()
        return
    by_rank = movable(received).view(group.size, -1).unbind()
    by_rank[group.rank].copy_(movable(sent).view(-1))
    if group.pairwise is None:
        for rank, part in enumerate(by_rank):
            dist.broadcast(part, group=group.process_group, group_src=rank)
        return
    aliases: list[Tensor] = []
    mine = alias_tensors([movable(sent).view(-1)] * group.size, aliases)
    theirs = alias_tensors(list(by_rank), aliases)
    for work in group.pairwise.exchange([mine], [theirs]):
        work.wait()
    empty_aliases(aliases)
