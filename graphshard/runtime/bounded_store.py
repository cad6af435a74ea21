"""Operations of a Store that end, also where the link to the rank that holds it is lost.

torch's client of a Store reads its answer without a limit of time. A rank whose host is cut off
would wait until TCP gives up, after a quarter of an hour.
"""

from __future__ import annotations

import threading
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any


class BoundedStore:
    """A Store, each of whose operations raises `RuntimeError` if it gets no answer in time.

    Until the answer comes all the same, others raise at once: they would wait for that connection.

    Args:
        store: a Store of torch.distributed.
        seconds: to wait for an answer, more than any operation waits for other ranks.
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
