"""The Store that ranks share: operations that end, and meetings of ranks, here threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from graphshard.runtime.store import BoundedStore, Meetings


class Store:
    """Answers once `connected` is set."""

    def __init__(self) -> None:
        self.connected = threading.Event()
        self.asked = 0

    def get(self, key: str) -> str:
        self.asked += 1
        self.connected.wait()
        if key == "missing":
            raise KeyError(key)
        return f"value of {key}"


def test_an_answer_in_time_is_returned_and_an_error_raised() -> None:
    store = Store()
    store.connected.set()
    bounded = BoundedStore(store, 5.0)
    assert bounded.get("a") == "value of a"
    with pytest.raises(KeyError, match="missing"):
        bounded.get("missing")


def test_without_an_answer_it_raises_and_asks_no_more_until_there_is_one() -> None:
    store = Store()
    bounded = BoundedStore(store, 0.05)
    with pytest.raises(RuntimeError, match=r"the Store did not answer a get within 0\.05 s"):
        bounded.get("a")
    with pytest.raises(RuntimeError, match="the Store has not answered a get yet"):
        bounded.get("b")
    assert store.asked == 1
    store.connected.set()
    for thread in threading.enumerate():
        if thread.name == "graphshard-store":
            thread.join(5.0)
    assert bounded.get("b") == "value of b"


class Counted:
    """A Store that counts calls but for polls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls[name] += name != "check"
        return getattr(self.store, name)  # type: ignore[no-any-return]


def on_all(meetings: list[Meetings], call: Callable[[Meetings], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(meetings)) as threads:
        return list(threads.map(call, meetings))


def made(store: Any, size: int, timeout: float = 20.0) -> list[Meetings]:
    return [Meetings(store, rank, size, timeout) for rank in range(size)]


def said(meeting: Meetings, key: str) -> bytes:
    return meeting.decide(key, f"rank {meeting.rank}".encode(), b", ".join)


def test_the_number_of_operations_does_not_grow_with_the_ranks() -> None:
    numbers = []
    for size in (4, 40):
        stores = [Counted(store) for store in [HashStore()] * size]
        meetings = [Meetings(store, rank, size, 20.0) for rank, store in enumerate(stores)]
        for turn in range(2):
            on_all(meetings, lambda meeting, key=str(turn): said(meeting, key))
        numbers.append(max(store.calls.total() for store in stores))
    assert numbers[0] == numbers[1] <= 10


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_comes_when_others_gave_up_is_told_at_once(first: int) -> None:
    meetings = made(HashStore(), 2, timeout=0.2)
    early, late = meetings[first], meetings[1 - first]
    with pytest.raises(RuntimeError, match="not all ranks came"):
        said(early, "0")
    late.timeout = 1000.0
    with pytest.raises(RuntimeError, match="not all ranks came"):
        said(late, "0")
    early.timeout = 20.0
    assert on_all(meetings, lambda meeting: said(meeting, "1")) == [b"rank 0, rank 1"] * 2


def test_keys_of_earlier_meetings_are_deleted() -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20))
    meetings = made(PrefixStore("meetings", server), 3)
    for turn in range(5):
        on_all(meetings, lambda meeting, key=str(turn): said(meeting, key))
    assert server.num_keys() <= 2  # the last verdict, and one of torch's own
