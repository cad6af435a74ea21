"""Sends and receives between the ranks of a Gloo group, for tensors in the host's memory.

A send reads a tensor where it lies and a receive writes it where it belongs, without the copies of
Gloo's collectives. All ranks must call `exchange` in the same order. See README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

UP_TO = 8
"""Ranks of a group whose gathers are sent. Each sends its shard to every other one, of which more
passes between hosts than around Gloo's ring, and the messages of a step grow with the ranks."""


_TAGS = 1 << 30
"""The first tag of ours, and their number; users' own are small."""


_exchanges: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""By process group, the numbers of its exchanges to come."""


class PairwiseExchange:
    """The other ranks of a group, and what was sent to them that nobody waited for.

    Args:
        process_group: a Gloo group of at least two ranks.
        rank: of this process in it.
        size: its number of ranks.
    """

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self._process_group = process_group
        # At each step every rank sends to one and receives from one.
        self._steps = [((rank + i) % size, (rank - i) % size) for i in range(1, size)]
        self._exchanges = _exchanges.setdefault(process_group, count())
        self._dropped: list[Any] = []

    def exchange(
        self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]]
    ) -> list[Any]:
        """Start sending `sent[m][r]` to each other rank r, and receiving `received[m][r]` from it.

        Message m of one is what the other receives as its message m. What stands there for this
        rank itself is left alone. Tensors are contiguous and of any dtype.

        Returns:
            The works to wait for; until then nobody may write what is sent. They keep the tensors.

        Raises:
            RuntimeError: a rank died or did not get here in time.
        """
        while self._dropped:
            self._dropped.pop(0).wait()
        tag = _TAGS + next(self._exchanges) % _TAGS
        group = self._process_group
        works = [
            group.recv([parts[source]], source, tag)
            for _, source in self._steps
            for parts in received
        ]
        for target, _ in self._steps:
            works += [group.send([parts[target]], target, tag) for parts in sent]
        return works

    def drop(self, works: list[Any]) -> None:
        """Take over `works` that nobody will wait for.

        At a message whose sender or receiver is gone Gloo would stop, and never come to those
        behind it. So they stay, and the next exchange waits for them.
        """
        self._dropped += works
