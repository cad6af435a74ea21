"""Averaging a unit's gradients over Gloo, which has no reduce_scatter of its own.

The ranks exchange parts of the gradients, and each averages the parts of its own shards. Every
element is averaged on one rank, in rank order, so the result does not depend on timing, and on 2
ranks it equals the all_reduce's bit for bit. See README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from graphshard.runtime.collectives import Operand, Pending
from graphshard.runtime.group import Group
from graphshard.runtime.reduce import ReduceScatter
from graphshard.torch_private import compat as torch_compat

_IN_ORDER = 4
"""Rows that torch adds up in order in every column."""

_VECTORS = 32
"""Columns of which torch adds up whole multiples in the order of the rows, in any dtype."""


class ReduceScatterByExchange(ReduceScatter):
    """Averages by an exchange of parts and a local mean, which adds up 16-bit floats in float32."""

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.options = torch_compat.collective_options("AllToAllOptions")
        self.options.asyncOp = group.side_stream is None

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Send every other rank its parts of each message."""
        received = [torch.empty_like(flat) for flat in sent]
        pending.buffers += received
        if self.group.pairwise is None:
            launch = self.group.process_group.alltoall_base
            for source, target in zip(sent, received, strict=True):
                self.start(pending, launch, target, source, [], [], self.options)
            return
        size, rank = self.group.size, self.group.rank
        to_ranks = [flat.view(size, flat.numel() // size).unbind() for flat in sent]
        from_ranks = [flat.view(size, flat.numel() // size).unbind() for flat in received]
        self.exchange(pending, to_ranks, from_ranks)
        pending.copies += [
            (target[rank], source[rank])
            for target, source in zip(from_ranks, to_ranks, strict=True)
        ]

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The mean over the parts that the ranks sent."""
        parts = received.view(self.group.size, -1)
        mean = parts.mean(0)
        # The CPU adds up the last columns of many rows in another order, unless they fill vectors.
        if self.group.size > _IN_ORDER and (rest := parts.shape[1] % _VECTORS):
            padded = functional.pad(parts[:, -rest:], (0, _VECTORS - rest))
            mean[-rest:] = padded.mean(0)[:rest]
        return mean


class ReduceScatterByPairExchange(ReduceScatterByExchange):
    """The exchange on two ranks, without a copy of this rank's own part."""

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Send the other rank its part of each message."""
        outgoing = [self._split(flat)[1] for flat in sent]
        received = [torch.empty_like(part) for part in outgoing]
        pending.buffers += received
        if self.group.pairwise is not None:
            self.exchange(pending, [(p, p) for p in outgoing], [(r, r) for r in received])
            return
        launch = self.group.process_group.alltoall_base
        for part, target in zip(outgoing, received, strict=True):
            counts = [0, 0]
            counts[1 - self.group.rank] = part.numel()
            self.start(pending, launch, target, part, counts, counts, self.options)

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The mean of both ranks' parts, in the storage of `received`."""
        local = self._split(sent)[0]
        if received.dtype is torch.float16:  # whose sum may overflow
            return received.copy_(received.float().add_(local).div_(2))
        return received.add_(local).div_(2)

    def _split(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's part, the other rank's part) of `sent`."""
        first, second = sent.chunk(2)
        return (first, second) if self.group.rank == 0 else (second, first)
