"""A CUDA device of numbers: two streams, events, and clocks of its own, for what `torch.cuda` is.

The host takes time to queue work; the device begins with it once it is queued and its stream has
reached it. While both streams are at work, each loses a part of its speed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

COMPUTE, SIDE = "compute", "side"


class Event:
    """An event that is complete at the time `at`, once the device was drained."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at: float | None = None

    def record(self, stream: str | None = None) -> None:
        self.at = None
        self.cuda.queue(stream or COMPUTE, _Item(self.cuda.host, event=self))

    def query(self) -> bool:
        self.cuda.drain()
        assert self.at is not None
        return self.at <= self.cuda.host

    def synchronize(self) -> None:
        self.cuda.drain()
        assert self.at is not None
        self.cuda.host = max(self.cuda.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        self.cuda.drain()
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


@dataclass
class _Item:
    """Something queued at the time `queued`: work, an event to record, or one to wait for."""

    queued: float
    seconds: float = 0.0
    event: Event | None = None
    awaited: Event | None = None


class FakeCuda:
    """What calibration uses of `torch.cuda`.

    lost: the parts of their speed that compute and the side stream lose while both are at work.
    """

    def __init__(
        self,
        *,
        lost: tuple[float, float] = (0.0, 0.0),
        l2: int = 1 << 20,
        free: int = 64 << 30,
        megahertz: float | None = 1500.0,
    ) -> None:
        self.host = 0.0
        self.l2, self.free, self.megahertz = l2, free, megahertz
        self.emptied = 0
        self.worked = 0.0
        self.work_by_stream: dict[str, int] = {COMPUTE: 0, SIDE: 0}
        self._speed = {COMPUTE: 1 - lost[0], SIDE: 1 - lost[1]}
        self._now = {COMPUTE: 0.0, SIDE: 0.0}
        self._items: dict[str, deque[_Item]] = {COMPUTE: deque(), SIDE: deque()}

    # -- as torch.cuda has it ---------------------------------------------------------------------

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802  # as torch's
        assert enable_timing
        return Event(self)

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(L2_cache_size=self.l2)

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        assert self.emptied
        return self.free, 2 * self.free

    def empty_cache(self) -> None:
        self.emptied += 1

    def clock_rate(self, device: Any) -> float:
        if self.megahertz is None:
            raise ModuleNotFoundError("no NVML")
        return self.megahertz

    # -- the device -------------------------------------------------------------------------------

    def launch(self, seconds: float, *, host: float = 5e-6, stream: str = COMPUTE) -> None:
        """The host takes `host` seconds to queue work of `seconds`."""
        self.host += host
        self.worked += seconds
        self.work_by_stream[stream] += 1
        self.queue(stream, _Item(self.host, seconds))

    def wait(self, stream: str, event: Event) -> None:
        self.queue(stream, _Item(self.host, awaited=event))

    def synchronize(self) -> None:
        self.drain()
        self.host = max(self.host, *self._now.values())

    def queue(self, stream: str, item: _Item) -> None:
        self._items[stream].append(item)

    def drain(self) -> None:
        """Do all that is queued."""
        while any(self._items.values()):
            if not any(self._without_work(stream) for stream in self._items):
                self._work()

    def _without_work(self, stream: str) -> bool:
        """Pass the events before the stream's next work; whether there was any."""
        items, passed = self._items[stream], False
        while items and not items[0].seconds:
            item = items[0]
            if item.awaited is not None:
                if item.awaited.at is None:
                    break
                self._now[stream] = max(self._now[stream], item.awaited.at)
            if item.event is not None:
                item.event.at = max(self._now[stream], item.queued)
            items.popleft()
            passed = True
        return passed

    def _work(self) -> None:
        """Work until the first stream is done with an item, or the other one begins."""
        begin: dict[str, float] = {}
        for stream, items in self._items.items():
            if items and items[0].seconds:
                begin[stream] = max(self._now[stream], items[0].queued)
        assert begin, "streams wait for what nobody records"
        start = min(begin.values())
        active = [stream for stream, at in begin.items() if at <= start]
        speed = {stream: self._speed[stream] if len(active) > 1 else 1.0 for stream in active}
        span = min(self._items[stream][0].seconds / speed[stream] for stream in active)
        waiting = [at - start for stream, at in begin.items() if stream not in active]
        span = min([span, *waiting])
        for stream in active:
            item = self._items[stream][0]
            item.seconds -= span * speed[stream]
            self._now[stream] = start + span
            if item.seconds <= 1e-15:
                self._items[stream].popleft()
