"""Whether the rows of resident parameters are those that were gathered last.

Signs such as version counters tell of most writes, but not of one through `param.data`, and of none
that torch did not make. So rows that show no sign are compared with a copy, and the ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from graphshard.runtime.agreement import Agreement
from graphshard.runtime.resident import ResidentShard
from graphshard.runtime.shards import Shard


class ResidentRows:
    """The resident parameters of a module that several ranks share.

    shards: these parameters, each once.
    stale: whether each one has to be gathered before a program reads it, as of the last look.

    Args:
        shards: all parameters of the module.
        agreement: between the ranks of the module.
    """

    def __init__(self, shards: Iterable[Shard], agreement: Agreement) -> None:
        self.shards = [
            s for s in shards if isinstance(s, ResidentShard) and s.layout.world_size > 1
        ]
        self.stale: tuple[bool, ...] = ()
        self._agreement = agreement
        self._failures = agreement.failures

    def look_for_signs(self) -> None:
        """Set `stale` by signs alone, which costs no reading of rows."""
        self.stale = tuple([shard.stale for shard in self.shards])

    def compare(self) -> None:
        """Set `stale` for a call that is about to run.

        A parameter that shows no sign is gathered nevertheless if no copy of its rows was kept, or
        if any rank finds a difference between such rows and their copies.
        """
        if self._failures != self._agreement.failures:
            # Some ranks may have looked for signs in a call that failed, and others did not.
            self._failures = self._agreement.failures
            for shard in self.shards:
                shard.forget_gathers()
        self.look_for_signs()
        if all(self.stale):
            return
        held = [s for s, stale in zip(self.shards, self.stale, strict=True) if not stale]
        pairs = []
        for shard in held:
            pair = shard.rows_to_compare()
            if pair is None:
                shard.note_changed()
            else:
                pairs.append(pair)
        if pairs and self._agreement.any_rank(_differ(pairs)):
            for shard in held:
                shard.note_changed()
        self.look_for_signs()


def _differ(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether two tensors of a pair, equal in shape and dtype, differ in any bit."""
    words = [_words(mine, other) for mine, other in pairs]
    if words[0][0].device.type == "cpu":
        return not all(torch.equal(mine, other) for mine, other in words)
    # The host waits once for all of them.
    return bool(torch.stack([torch.ne(mine, other).any() for mine, other in words]).any())


def _words(*pair: Tensor) -> list[Tensor]:
    """The bits of contiguous tensors of one shape, as the widest integers that fit them all.

    A view of rows may begin where no wide integer does, and its copy elsewhere.
    """
    size = pair[0].element_size()
    flat = [tensor.view(-1).view(_INTEGERS.get(size, torch.int64)) for tensor in pair]
    wider = 8 // size if size < 8 else 1
    if any(words.numel() % wider or words.storage_offset() % wider for words in flat):
        return flat
    return [words.view(torch.int64) for words in flat]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
