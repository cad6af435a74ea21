"""Where each rank is, for the ranks that wait for it in vain; see README.md."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from graphshard.runtime.store import Meetings

logger = logging.getLogger("graphshard")

PATIENCE = 10.0
"""Seconds without a move after which a rank says where it is, or a quarter of the timeout."""

_LOOKS = 4  # in that time
_WARNS_AT = 0.5  # of the timeout
_LAUNCHES = 1024  # on side streams, that are remembered
_READERS = 8  # ranks that log where all others are: each reads a key of every rank
_END = 10.0  # seconds that the end of Python waits for the thread

_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By process group, the thread's own connection to its Store."""


def connection_of(process_group: Any, store: Any) -> Any:
    """A connection of the watching thread's own, as a call that waits may hold the other.

    It is made while all ranks are well. Once the rank that holds the Store is gone, torch tries for
    twice the Store's timeout, and Python must not end as long as the thread is inside of torch. All
    modules of the group share it.
    """
    if process_group not in _connections:
        try:
            _connections[process_group] = store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):  # not every Store can
            _connections[process_group] = store
    return _connections[process_group]


@dataclass(frozen=True, eq=False)
class At:
    """A place in a program: a wait, or what comes after it.

    number: of the wait in its forward or backward; 0 where ranks meet before it. text: what is
    waited for. waits: the wait is not over.
    """

    number: int
    text: str
    waits: bool

    def __str__(self) -> str:
        return f"waits for {self.text}" if self.waits else f"has done nothing after {self.text}"


_NOWHERE = At(0, "the beginning", False)


class Whereabouts:
    """Where this rank is in the programs of one module.

    turn: how often its ranks compared what they begin. at: the last place it came to.
    begun: launches in this forward or backward so far. done: those that `LoweredGraph.finish` need
    not make again. lost: one of them failed, so that nothing more reaches the other ranks.
    """

    def __init__(self) -> None:
        self.turn = 0
        self.at = _NOWHERE
        self.begun = self.done = 0
        self.lost = False
        self._captures = False
        self._store: Any = None
        self._rank, self._size, self._timeout, self._meets = 0, 1, 0.0, False
        self._launched: deque[tuple[int, At, Any]] = deque(maxlen=_LAUNCHES)
        self._seen: tuple[int, At] = (0, _NOWHERE)
        self._since = time.monotonic()
        self.line: _Line | None = None  # once it is attached
        self._warned = False
        self.looks_too: weakref.ref[Any] | None = None

    def attach(self, meetings: Meetings, *, writes: Any = None, meets: bool = False) -> None:
        """Watch this rank from now on.

        writes: the ranks' part of the Store by a connection for the watching thread.
        meets: all ranks meet at the beginning of each turn.
        """
        self._store, self._rank, self._size = meetings.store, meetings.rank, meetings.size
        self._timeout = meetings.timeout
        self._meets = meets
        self.line = _Line(writes or meetings.store, _key(meetings.rank))
        _watch().add(self)

    @property
    def patience(self) -> float:
        """Seconds without a move after which this rank says where it is."""
        return min(PATIENCE, self._timeout / 4)

    def launched(self, at: At, event: Any) -> None:
        """Remember a launch on a side stream, of which the host waits for nothing."""
        if self.line is not None and not self._captures:
            self._launched.append((self.turn, at, event))

    def has_done(self) -> bool:
        """Whether the next launch was made before this rank's error."""
        self.done, done = max(0, self.done - 1), self.done
        return done > 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Launches inside may be captured in a CUDA graph, and cannot be asked about."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    # -- in the watching thread -----------------------------------------------------------------

    def look(self) -> None:
        """Tell where this rank is if it did not move on; take it back if it did."""
        line = self.line
        if line is None:
            return
        now, here = time.monotonic(), self._here()
        if here[0] != self._seen[0] or here[1] is not self._seen[1]:
            self._seen, self._since, self._warned = here, now, False
            line.take_back()
        waited = now - self._since
        if waited < self.patience:
            return
        looks_too = None if self.looks_too is None else self.looks_too()
        if looks_too is not None:
            looks_too.look()
        turn, at = here
        if not line.told:
            said = {"turn": turn, "number": at.number, "waits": at.waits, "text": at.text}
            line.tell(json.dumps(said))
        if at.waits and not self._warned and waited > _WARNS_AT * self._timeout:
            self._warned = True
            logger.warning(
                "rank %d of %d %s for %.0f s, of at most %g s%s",
                self._rank, self._size, at, waited, self._timeout,
                self.others() if self._rank < _READERS else "",
            )  # fmt: skip

    def _here(self) -> tuple[int, At]:
        """The turn and the place: of the device, if it is behind the host."""
        launched = self._launched
        while launched:
            turn, at, event = launched[0]
            if not _is_done(event):
                return turn, at
            launched.popleft()
        return self.turn, self.at

    # -- in errors ------------------------------------------------------------------------------

    def others(self) -> str:
        """Where the other ranks are: "; rank 1 ..."; "" if this rank waited for a short time."""
        if self.line is None or not self.line.told:
            return ""
        turn, at = self._seen if self._launched else (self.turn, self.at)
        found: dict[str, list[int]] = {}
        for rank in range(self._size):
            if rank != self._rank:
                found.setdefault(self._of(rank, turn, at), []).append(rank)
        return "".join(f"; {_ranks(ranks)} {text}" for text, ranks in found.items())

    def _of(self, rank: int, turn: int, mine: At) -> str:
        line = None
        with suppress(Exception):
            if self._store.check([_key(rank)]):
                line = json.loads(self._store.get(_key(rank)))
        # A rank that this one met since then cannot take a line back once it is stopped.
        outdated = line is not None and self._meets and mine.number > 0 and line["turn"] < turn
        if line is None or outdated:
            return "says nothing: stopped, dead, cut off, or busy in code that never pauses"
        at = At(line["number"], line["text"], line["waits"])
        if (line["turn"], at.number, at.waits) == (turn, mine.number, mine.waits):
            return "is there too" if at.text == mine.text else str(at)
        past = (line["turn"], at.number, not at.waits) > (turn, mine.number, not mine.waits)
        return f"is past that: it {at}" if past else f"has not come there: it {at}"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a verb in the singular: "rank 3", "each of ranks 0 to 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"each of ranks {ranks[0]} to {ranks[-1]}"
    return f"each of ranks {', '.join(map(str, ranks))}"


def _is_done(event: Any) -> bool:
    try:
        return bool(event.query())
    except Exception:  # an error of the device, which the next call raises
        return False


def _key(rank: int) -> str:
    return f"at/{rank}"


class _Line:
    """The line of this rank in the Store, written by the watching thread alone."""

    def __init__(self, store: Any, key: str) -> None:
        self.told = False
        self._store, self._key = store, key

    def tell(self, text: str) -> None:
        with suppress(Exception):  # the Store may be gone, with the rank that held it
            self._store.set(self._key, text)
            self.told = True

    def take_back(self) -> None:
        if self.told:
            self.told = False
            with suppress(Exception):
                self._store.delete_key(self._key)


class _Watch:
    """The thread that looks at all modules of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[tuple[weakref.ref[Whereabouts], _Line]] = []
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, here: Whereabouts) -> None:
        assert here.line is not None
        with self._lock:
            self._watched.append((weakref.ref(here), here.line))
        if self._thread is None or not self._thread.is_alive():  # as after a fork
            self._thread = threading.Thread(target=self._run, name="graphshard-watch", daemon=True)
            self._thread.start()
            atexit.register(self.stop)
        self._wake.set()

    def stop(self) -> None:
        """End the thread before Python ends, which would abort with a thread inside of torch."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_END)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._look())
            self._wake.clear()

    def _look(self) -> float:
        with self._lock:
            watched, self._watched = self._watched, []
        patience = PATIENCE
        for ref, line in watched:
            here = ref()
            if here is None or here.line is not line:  # the module is gone, or has another Store
                line.take_back()
                continue
            with self._lock:
                self._watched.append((ref, line))
            patience = min(patience, here.patience)
            with suppress(Exception):  # a thread that nobody sees must go on
                here.look()
        return max(0.05, patience / _LOOKS)


@cache
def _watch() -> _Watch:
    return _Watch()
