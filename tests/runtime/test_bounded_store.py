"""A Store whose operations end."""

from __future__ import annotations

import threading

import pytest

from graphshard.runtime.bounded_store import BoundedStore


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
