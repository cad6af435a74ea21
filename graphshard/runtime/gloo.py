"""Moving tensors between the ranks of a Gloo group by sends and receives; see README.md.

All ranks must call `exchange` in the same order. `reduce.py` averages gradients by such exchanges.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed import Work

from graphshard.torch_private.coalesced import Works

MAX_RANKS = 8
"""The most ranks of a group whose gathers are sent. Each rank sends its shard to every other one:
on more ranks, more data passes between hosts than around Gloo's ring."""


_TAGS = 1 << 30
"""The first tag of these exchanges, and how many there are; users' own tags are small."""


_exchanges: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""By process group, the numbers of its next exchanges."""


class PairwiseExchange:
    """Sends and receives between this rank and every other rank of a Gloo group."""

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self._process_group = process_group
        # In each step a rank sends to one other rank and receives from another.
        self._steps = [((rank + i) % size, (rank - i) % size) for i in range(1, size)]
        self._exchanges = _exchanges.setdefault(process_group, count())
        self._abandoned: list[Any] = []

    def exchange(
        self,
        sent: Sequence[Sequence[Tensor]],
        received: Sequence[Sequence[Tensor]],
        *,
        meets: bool = False,
    ) -> list[Any]:
        """Start sending `sent[m][r]` to each other rank r, and receiving `received[m][r]` from it.

        Tensors are contiguous, of any dtype; those of this rank itself are ignored. The works to
        wait for keep them alive; until then nobody may write `sent`.

        meets: the ranks meet by it. Such an exchange takes no message of another kind, which a
            rank may be in whose peer failed and came to a meeting instead.
        """
        while self._abandoned:
            self._abandoned.pop(0).wait()
        tag = _TAGS + (2 * next(self._exchanges) + meets) % _TAGS
        group = self._process_group
        works = []
        for _, source in self._steps:
            for by_rank in received:
                works.append(group.recv([by_rank[source]], source, tag))
        for target, _ in self._steps:
            for by_rank in sent:
                works.append(group.send([by_rank[target]], target, tag))
        return works

    def abandon(self, works: list[Any]) -> None:
        """Keep `works` that nobody will wait for, until the next exchange waits for them.

        Gloo would stop at a message whose sender or receiver is gone, and never reach the messages
        behind it.
        """
        self._abandoned += works


def alias_tensors(value: Any, aliases: list[Tensor]) -> Any:
    """`value` with an alias in place of each tensor in it; the aliases are added to `aliases`.

    Gloo's threads are given these, which `empty_aliases` empties; see README.md. `value` is an
    argument of a collective: tensors in lists of lists, or anything else.
    """
    if isinstance(value, Tensor):
        aliases.append(value.detach())
        return aliases[-1]
    return [alias_tensors(item, aliases) for item in value] if isinstance(value, list) else value


def empty_aliases(aliases: Sequence[Tensor]) -> None:
    """Point `aliases` at no storage, once the work that uses them is done."""
    for alias in aliases:
        alias.set_()  # type: ignore[call-overload]


def let_readers_wait() -> None:
    """Have Gloo's reading threads wait until a core is free, on Linux; see README.md.

    A reader that takes the core of a thread in the midst of a send finds the connection locked, and
    asks for it again until the scheduler's next tick, 4 ms later, which is longer than most
    messages take. Under SCHED_BATCH (sched(7)) a thread that wakes up takes no core from another.
    """
    for reader in readers():
        with suppress(OSError):  # it ended, or may not be changed
            os.sched_setscheduler(reader, os.SCHED_BATCH, os.sched_param(0))


def readers() -> Iterator[int]:
    """The threads of this process in which Gloo reads messages, by their ids; only on Linux."""
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it ended
            if (task / "comm").read_text().startswith("gloo_tcp"):
                yield int(task.name)


_LAST = 0.05
"""Seconds in which Gloo's threads let go of the last works before Python ends."""


@cache
def let_threads_finish() -> None:
    """Have Python wait at its end until Gloo's threads have let go of works that are done.

    Also those of collectives that others began, which `keep` does not see. See README.md.
    """
    atexit.register(time.sleep, _LAST)


_kept: deque[Any] = deque(maxlen=256)
"""Works of collectives to which Gloo's threads may still refer."""


def keep(work: Any) -> None:
    """Keep the work of a collective of Gloo's until it is done and another one is kept.

    See README.md. Works that cannot tell whether they are done (of reduce_scatter, which Gloo makes
    of others) are kept until many have followed. What is no work of torch's, such as what a
    caller's own function returned, has no threads of Gloo's.
    """
    if not isinstance(work, Work | Works):
        return
    done = [each for each in _kept if each.is_completed()]
    for each in done:
        _kept.remove(each)
    _kept.append(work)
