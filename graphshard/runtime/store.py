"""The Store that ranks share: operations that end, and meetings of the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any


class BoundedStore:
    """A Store, each of whose operations raises `RuntimeError` if it has no answer in `seconds`.

    torch's client of a Store reads its answer without a limit of time. A rank whose host is cut off
    from the rank that holds the Store would wait until TCP gives up, after a quarter of an hour.
    Until the answer comes all the same, others raise at once: they would wait for that connection.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._unanswered = ""

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name, getattr(self._store, name))

    def _ask(self, name: str, operation: Any, *args: Any) -> Any:
        if self._unanswered:
            raise RuntimeError(f"the Store has not answered a {self._unanswered} yet")
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def ask() -> None:
            try:
                value, failure = operation(*args), None
            except BaseException as error:
                value, failure = None, error
            self._unanswered = ""
            answers.put((value, failure))

        threading.Thread(target=ask, name="graphshard-store", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._seconds)
        except Empty:
            self._unanswered = name
            raise RuntimeError(
                f"the Store did not answer a {name} within {self._seconds:g} s"
            ) from None
        if error is not None:
            raise error
        return value


_FIRST_SLEEP = 0.001  # seconds
_LONGEST_SLEEP = 0.5
_SLEEP_SHARE = 0.25  # of the time waited so far

_LOST = b"lost"
"""The verdict of a rank that waited in vain; others are pickled."""


class Meetings:
    """The meetings of the ranks that share a part of the Store, with keys of nobody else.

    Rank 0 reads what all say at once, and all read its verdict. So each rank makes a fixed number
    of operations whatever their number, but for polls, which become rarer the longer it waits.

    timeout: seconds that a rank waits for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._verdict = ""  # the key of the last one, which rank 0 deletes

    def decide(self, key: str, mine: bytes, judge: Callable[[list[bytes]], bytes]) -> bytes:
        """What `judge` makes of what all ranks say, in their order; the same on all of them.

        Args:
            key: of this meeting, the same on all ranks.
            mine: what this rank says.
            judge: called on rank 0.
        """
        store, verdict = self.store, f"{key}/verdict"
        values = [f"{key}/{rank}" for rank in range(self.size)]
        store.set(values[self.rank], mine)
        if self.rank:
            found = store.get(verdict) if self._wait(verdict) else self._give_up(verdict)
        elif self._wait(verdict, values) and not store.check([verdict]):
            found = store.compare_set(verdict, "", judge(store.multi_get(values)))
        else:
            found = self._give_up(verdict)
        if found == _LOST:
            raise RuntimeError("not all ranks came in time")
        store.delete_key(values[self.rank])
        if self._verdict and not self.rank:
            store.delete_key(self._verdict)  # all have read it, since they are here
        self._verdict = verdict
        return bytes(found)

    def _give_up(self, verdict: str) -> bytes:
        """The verdict that all get, those too that come later: that ranks are lost, or another."""
        found: bytes = self.store.compare_set(verdict, "", _LOST)
        return found

    def _wait(self, verdict: str, values: list[str] | None = None) -> bool:
        """Whether the keys `values`, or the verdict, are there before the timeout."""
        begin = time.monotonic()
        # Polls let other threads use the connection in between.
        while not (self.store.check([verdict]) or (values and self.store.check(values))):
            waited = time.monotonic() - begin
            if waited > self.timeout:
                return False
            time.sleep(min(max(_FIRST_SLEEP, _SLEEP_SHARE * waited), _LONGEST_SLEEP))
        return True
