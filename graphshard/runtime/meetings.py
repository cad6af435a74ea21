"""Ranks that meet in the Store, each with a fixed number of operations whatever their number.

A rank compares its digest with that of the first to arrive (`compare_set`), counts itself (`add`),
and looks for the key that the last to arrive sets. Polls become rarer the longer it waits. The last
to arrive at the next meeting deletes the keys of this one. See README.md for the time that the
Store takes with 512 and 4,096 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST_SLEEP = 0.001  # seconds
_LONGEST_SLEEP = 0.5
_SLEEP_SHARE = 0.25  # of the time waited so far

_FIELD = 1 << 15
"""A counter holds four numbers of ranks, each below this: arrived, flagged, refusing, gone."""

_ARRIVED, _FLAGGED, _REFUSING, _GONE = (_FIELD**power for power in range(4))
_BITS = 60  # ranks whose flags fit one counter of the Store, an int64


class Meetings:
    """The meetings of the ranks that share a part of the Store.

    Args:
        store: their part, with keys of nobody else.
        rank: of this process among them.
        size: their number, below 32,768.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        assert size < _FIELD
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._spent: list[str] = []
        """Keys of the last meeting that this rank deletes."""
        self._deletes: list[str] = []
        """Those of earlier ones, which nobody reads once all ranks have come to this one."""

    def meet(
        self, turn: int, digest: str, *, flag: bool = False, failed: bool = False
    ) -> list[bool] | None:
        """The flags of all ranks, or None if some rank failed or gave another digest.

        Args:
            turn: the number of the meeting, the same on all ranks.
            digest: what must be the same on all ranks.
            flag: to tell.
            failed: whether this rank refuses to go on.
        """
        self.arrive(turn, digest, flag=flag, failed=failed)
        return self.leave(turn)

    def arrive(self, turn: int, digest: str, *, flag: bool = False, failed: bool = False) -> None:
        """The half of `meet` that waits for nobody."""
        store = self.store
        first = store.compare_set(f"{turn}/digest", "", digest).decode()
        number = _ARRIVED + flag * _FLAGGED + (failed or first != digest) * _REFUSING
        self._deletes, self._spent = [*self._deletes, *self._spent], []
        if flag:
            store.add(f"{turn}/flags/{self.rank // _BITS}", 1 << self.rank % _BITS)
        count = store.add(f"{turn}/count", number)
        if count % _FIELD == self.size:
            store.set(f"{turn}/all", str(count))
            words = [f"{turn}/flags/{word}" for word in range(-(-self.size // _BITS))]
            flags = words if count // _FLAGGED % _FIELD else []
            self._spent = [f"{turn}/digest", f"{turn}/count", f"{turn}/all", *flags]
        if count // _GONE:
            raise RuntimeError(f"{count // _GONE} ranks had given up waiting")

    def leave(self, turn: int) -> list[bool] | None:
        """The half of `meet` that waits for all ranks."""
        store = self.store
        try:
            self._await(f"{turn}/all")
        except TimeoutError:
            count = store.add(f"{turn}/count", _GONE)
            if count % _FIELD < self.size:
                raise RuntimeError(f"{self.size - count % _FIELD} ranks did not come") from None
            self._await(f"{turn}/all")
        count = int(store.get(f"{turn}/all"))
        if count // _GONE:
            raise RuntimeError(f"{count // _GONE} ranks had given up waiting")
        while self._deletes:
            store.delete_key(self._deletes.pop())
        if count // _REFUSING % _FIELD:
            return None
        flagged = count // _FLAGGED % _FIELD
        if flagged in (0, self.size):
            return [bool(flagged)] * self.size
        words = [store.add(f"{turn}/flags/{word}", 0) for word in range(-(-self.size // _BITS))]
        return [bool(words[rank // _BITS] >> rank % _BITS & 1) for rank in range(self.size)]

    def first_to_say(self, turn: int, key: str) -> bool:
        """Whether no other rank asked the same before."""
        name = f"{turn}/said/{key}"
        first = self.store.add(name, 1) == 1
        if first:
            self._spent.append(name)
        return first

    def judge(self, turn: int, mine: bytes, judge: Callable[[list[bytes]], bytes]) -> bytes:
        """What rank 0 makes of the values of all ranks, on every rank.

        Args:
            turn: of the meeting that `meet` returned None of.
            mine: the value of this rank.
            judge: from the values of all ranks, in order, to what all return; called on rank 0.
        """
        store, own = self.store, f"{turn}/value/{self.rank}"
        store.set(own, mine)
        self._spent.append(own)
        try:
            if self.rank == 0:
                values = []
                for rank in range(self.size):
                    self._await(f"{turn}/value/{rank}")
                    values.append(store.get(f"{turn}/value/{rank}"))
                store.set(f"{turn}/verdict", judge(values))
                self._spent.append(f"{turn}/verdict")
            self._await(f"{turn}/verdict")
        except TimeoutError as error:
            raise RuntimeError("a rank that refused did not say why") from error
        verdict: bytes = store.get(f"{turn}/verdict")
        return verdict

    def _await(self, key: str) -> None:
        """Return once `key` is set; polls let other threads use the connection in between."""
        begin = time.monotonic()
        while not self.store.check([key]):
            waited = time.monotonic() - begin
            if waited > self.timeout:
                raise TimeoutError(key)
            time.sleep(min(max(_FIRST_SLEEP, _SLEEP_SHARE * waited), _LONGEST_SLEEP))
