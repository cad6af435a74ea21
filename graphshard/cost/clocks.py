"""Clocks of a step's streams, shared by the timeline, the list scheduler and the order scorer."""

from __future__ import annotations

from graphshard.hardware.hardware import Hardware

_MOST = 0.85  # a kernel goes on, however many bytes a collective moves beside it


class Clocks:
    """The times at which compute and each other stream become free, in seconds of the step.

    Compute nodes run one after the other. A collective or a copy between device and host starts
    once its stream is free and compute has reached the place that launches it.

    Compute is slower beside them. A collective occupies multiprocessors, which costs every kernel
    the fraction `contention` of the hardware; on hosts a copy does so, too. And what it reads and
    writes of the memory's bandwidth is missing to kernels that only move bytes.

    now: when compute becomes free. ends: when each other stream becomes free, by its name.
    """

    __slots__ = ("_busy_until", "_contention", "_loads", "_on_host", "ends", "now")

    def __init__(self, hardware: Hardware) -> None:
        self._contention = hardware.contention
        self._on_host = hardware.is_host
        self.now = self._busy_until = 0.0
        self.ends: dict[str, float] = {}
        self._loads: list[tuple[float, float, float]] = []  # of memory: start, end, part of it

    @property
    def end(self) -> float:
        """Seconds after which all streams are free."""
        return max([self.now, *self.ends.values()])

    def compute(self, seconds: float, *, only_moves: bool = False) -> None:
        """Run `seconds` of compute, which take longer while other streams slow it down.

        `only_moves`: the kernel reads and writes memory and computes nothing.
        """
        if only_moves and seconds and self._loads:
            seconds = self._beside_loads(seconds)
        contended = self._busy_until - self.now
        if seconds and self._contention and contended > 0:
            speed = 1 - self._contention
            done = contended * speed  # seconds of compute that finish meanwhile
            seconds = seconds / speed if done >= seconds else contended + seconds - done
        self.now += seconds

    def _beside_loads(self, seconds: float) -> float:
        """Run `seconds` of moving bytes while memory has loads; return what is left to run."""
        self._loads = [load for load in self._loads if load[1] > self.now]
        times = sorted({time for load in self._loads for time in load[:2] if time > self.now})
        for until in times:
            taken = sum(part for start, end, part in self._loads if start <= self.now < end)
            held = self._contention if self.now < self._busy_until else 0.0
            speed = 1 - max(held, min(_MOST, held + taken))
            done = (until - self.now) * speed
            if done >= seconds:
                self.now += seconds / speed
                return 0.0
            self.now, seconds = until, seconds - done
        return seconds

    def launch(
        self, stream: str, seconds: float, *, load: float = 0.0, copy: bool = False
    ) -> float:
        """Occupy `stream` for `seconds` once it is free, and return the time it ends.

        Args:
            stream: its name.
            seconds: its duration with nothing else under way.
            load: the part of the memory's bandwidth that it takes.
            copy: whether it is a copy between device and host, not a collective.
        """
        start = max(self.now, self.ends.get(stream, 0.0))
        end = start + seconds
        self.ends[stream] = end
        if not copy or self._on_host:
            self._busy_until = max(self._busy_until, end)
        if load:
            self._loads.append((start, end, load))
        return end

    def wait(self, end: float) -> None:
        """Make compute wait until the time `end`."""
        self.now = max(self.now, end)
