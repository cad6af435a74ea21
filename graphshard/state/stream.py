"""Whole tensors one after another, for whoever takes the weights of a model in pieces.

An inference engine copies each tensor into its own layout. So no more is gathered than the next
tensors for which there is room, and each message between ranks brings as many as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.errors import CheckpointError
from graphshard.format import human_bytes
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.lowered import Bindings
from graphshard.runtime.whole import Packed, Wanted, padded
from graphshard.state.state_tensors import StateTensor, by_name, gathered_line, state_tensors_of


@dataclass(frozen=True)
class _Entry:
    """A tensor to hand out under `name` in `dtype`."""

    name: str
    source: StateTensor
    dtype: torch.dtype

    @property
    def wanted(self) -> Wanted | None:
        """What to gather; None for a buffer."""
        return None if self.source.shard is None else Wanted(self.source.shard, self.dtype)

    @property
    def nbytes(self) -> int:
        wanted = self.wanted
        return self.source.tensor.numel() * self.dtype.itemsize if wanted is None else wanted.nbytes

    @property
    def peak(self) -> int:
        """The most bytes that it takes by itself."""
        wanted = self.wanted
        return self.nbytes if wanted is None else wanted.peak

    def value(self) -> Tensor:
        wanted = self.wanted
        if wanted is not None:
            return wanted.gather()
        return self.source.tensor.detach().to(self.dtype, copy=True)


def iter_full(
    module: nn.Module,
    bindings: Bindings,
    *,
    max_bytes: int | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """Check the call on all ranks; return the iterator of `ShardedModule.iter_full`."""
    with bindings.agreement.part() as part:
        tensors = by_name(state_tensors_of(module, bindings))
        entries = []
        for name in module.state_dict(keep_vars=True):
            source = tensors[name]
            cast = dtype is not None and source.dtype.is_floating_point
            entries.append(_Entry(name, source, dtype if cast and dtype else source.dtype))
        batches = _batches(entries, max_bytes)
        part.same += [gathered_line(each.name, each.source.tensor) for each in entries]
    return _hand_out(batches, bindings, bindings.agreement.text)


def _hand_out(
    batches: Sequence[Sequence[_Entry]], bindings: Bindings, text: str
) -> Iterator[tuple[str, Tensor]]:
    agreement = bindings.agreement
    for number, batch in enumerate(batches, 1):
        what = f"{text}, batch {number} of {len(batches)}, from {batch[0].name!r} on"
        packed = None
        with agreement.call(what), torch.no_grad(), torch.inference_mode(False):
            with agreement.part() as part:
                for entry in batch:
                    if entry.source.shard is not None:
                        entry.source.shard.current()
                part.same.append(batch[-1].name)
            if len(batch) > 1:
                packed = Packed([each.wanted for each in batch if each.wanted is not None])
        for index, entry in enumerate(batch):
            # No name here refers to a tensor that was handed out.
            yield entry.name, _value(entry, packed, index, agreement, what)


def _value(
    entry: _Entry, packed: Packed | None, index: int, agreement: Agreement, what: str
) -> Tensor:
    with agreement.call(what), torch.no_grad(), torch.inference_mode(False):
        return entry.value() if packed is None else packed.whole(index)


def _batches(entries: Sequence[_Entry], max_bytes: int | None) -> list[list[_Entry]]:
    """Neighbours to gather together, all within `max_bytes`.

    Counted is the tensor that was handed out before, too, which a `for` loop holds until it has the
    next one. Where only that would be too much, it is left to the caller to drop it.
    """
    if max_bytes is None:
        before = [0, *(each.nbytes for each in entries)]
        max_bytes = max(
            (held + each.peak for held, each in zip(before, entries, strict=False)), default=0
        )
    batches: list[list[_Entry]] = []
    held = 0  # bytes of the last tensor of the batch before
    for entry in entries:
        if entry.peak > max_bytes:
            raise CheckpointError(
                f"gathering {entry.name!r} takes {entry.peak} bytes ({human_bytes(entry.peak)}), "
                f"more than max_bytes={max_bytes}; pass at least that much"
            )
        if batches and _packed_peak([*batches[-1], entry], held) <= max_bytes:
            batches[-1].append(entry)
        else:
            held = batches[-1][-1].nbytes if batches else 0
            batches.append([entry])
    return batches


def _packed_peak(batch: Sequence[_Entry], held: int) -> float:
    """The most bytes in use while `batch` is gathered in one message and handed out."""
    wanted: list[Any] = [each.wanted for each in batch]
    if any(each is None or not each.is_split for each in wanted):
        return float("inf")
    sent = sum(padded(each.sent_bytes) for each in wanted)
    received = sent * wanted[0].shard.layout.world_size
    cast = max(each.sent_bytes for each in wanted)
    copies = max(each.copied_bytes for each in wanted) + max(held, *(e.nbytes for e in wanted))
    return max(held + sent + received + cast, received + copies)
