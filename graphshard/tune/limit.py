"""The time that a search may take."""

from __future__ import annotations

import time


class TimeLimit:
    """A limit of `seconds` from now on, or none.

    A search goes on for `seconds` all told, and looks between two simulations; what it needs to
    give a result at all (a capture, one policy that fits, its verification) it does nevertheless.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    def passed(self, share: float = 1.0) -> bool:
        """Whether this share of the time is over; a part of a search leaves the rest to others."""
        if self.seconds is None:
            return False
        return time.monotonic() - self._begin >= share * self.seconds
