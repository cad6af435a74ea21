"""Ranks that meet in the Store: threads of one process, each with a fixed number of operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from graphshard.runtime.meetings import Meetings


class Counted:
    """A Store that counts calls by name."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self.store, name)(*args)

        return call


def on_all(meetings: list[Meetings], call: Callable[[Meetings], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(meetings)) as threads:
        return list(threads.map(call, meetings))


def made(store: Any, size: int, timeout: float = 20.0) -> list[Meetings]:
    return [Meetings(store, rank, size, timeout) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 64, 130])
def test_each_rank_learns_the_flags_of_all(size: int) -> None:
    meetings = made(HashStore(), size)
    for turn, flagged in enumerate([set(), {0}, {1, size - 1}, set(range(size))]):
        for meeting in meetings:
            meeting.arrive(turn, "same", flag=meeting.rank in flagged)
        expected = [rank in flagged for rank in range(size)]
        assert all(meeting.leave(turn) == expected for meeting in meetings)


def test_the_number_of_operations_does_not_grow_with_the_ranks() -> None:
    numbers = []
    for size in (4, 40):
        stores = [Counted(store) for store in [HashStore()] * size]
        meetings = [Meetings(store, rank, size, 20.0) for rank, store in enumerate(stores)]
        for turn in range(2):
            for meeting in meetings:
                meeting.arrive(turn, "same")
            for meeting in meetings:
                meeting.leave(turn)
        numbers.append(max(store.calls.total() for store in stores))
    assert numbers[0] == numbers[1] <= 15


def test_ranks_that_differ_or_fail_hear_the_verdict_of_rank_0() -> None:
    meetings = made(HashStore(), 5)
    for turn, differing in enumerate(["digest", "failed"]):

        def meet(meeting: Meetings, turn: int = turn, differing: str = differing) -> Any:
            odd = meeting.rank == 3
            digest = "other" if odd and differing == "digest" else "same"
            met = meeting.meet(turn, digest, failed=odd and differing == "failed")
            assert met is None
            first = meeting.first_to_say(turn, digest)
            said = f"{digest} by {meeting.rank}{' first' * first}".encode()
            return meeting.judge(turn, said, b"; ".join)

        (verdict,) = {*on_all(meetings, meet)}
        assert verdict.count(b"same by") == (4 if differing == "digest" else 5)
        assert verdict.count(b"first") == (2 if differing == "digest" else 1)
    assert on_all(meetings, lambda meeting: meeting.meet(2, "same")) == [[False] * 5] * 5


def test_a_rank_that_comes_when_others_gave_up_is_told_at_once() -> None:
    early, late = made(HashStore(), 2, timeout=0.2)
    with pytest.raises(RuntimeError, match="1 ranks did not come"):
        early.meet(0, "same")
    late.timeout = 1000.0
    with pytest.raises(RuntimeError, match="1 ranks had given up"):
        late.meet(0, "same")
    late.timeout = 20.0
    assert on_all([early, late], lambda meeting: meeting.meet(1, "same")) == [[False] * 2] * 2


def test_keys_of_earlier_meetings_are_deleted() -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20))
    meetings = made(PrefixStore("meetings", server), 3)
    numbers = []
    for turn in range(12):
        kinds = {"failed": turn % 2 == 1, "flag": turn % 3 == 0}

        def meet(meeting: Meetings, turn: int = turn, kinds: dict[str, bool] = kinds) -> None:
            mine = {name: on and meeting.rank == 1 for name, on in kinds.items()}
            if meeting.meet(turn, "same", **mine) is None:
                meeting.first_to_say(turn, "same")
                meeting.judge(turn, b"", b"".join)

        on_all(meetings, meet)
        numbers.append(server.num_keys())
    assert max(numbers) < 16
