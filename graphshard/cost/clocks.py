"""Clocks of a step's streams, shared by the timeline, the list scheduler and the order scorer."""

from __future__ import annotations


class Clocks:
    """The times at which compute and each other stream become free, in seconds of the step.

    Compute nodes run one after the other. A collective or a copy between device and host starts
    once its stream is free and compute has reached the place that launches it. While any of them
    is running, compute is slower by the fraction `contention` of the hardware.

    now: when compute becomes free. ends: when each other stream becomes free, by its name.
    busy_until: when the last launched collective or copy ends.
    """

    __slots__ = ("busy_until", "contention", "ends", "now")

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self.now = self.busy_until = 0.0
        self.ends: dict[str, float] = {}

    @property
    def end(self) -> float:
        """Seconds after which all streams are free."""
        return max([self.now, *self.ends.values()])

    def compute(self, seconds: float) -> None:
        """Run `seconds` of compute, which take longer while other streams slow it down."""
        contended = self.busy_until - self.now
        if seconds and self.contention and contended > 0:
            speed = 1 - self.contention
            done = contended * speed  # seconds of compute that finish meanwhile
            seconds = seconds / speed if done >= seconds else contended + seconds - done
        self.now += seconds

    def launch(self, stream: str, seconds: float) -> float:
        """Occupy `stream` for `seconds` once it is free, and return the time it ends."""
        end = max(self.now, self.ends.get(stream, 0.0)) + seconds
        self.ends[stream] = end
        self.busy_until = max(self.busy_until, end)
        return end

    def wait(self, end: float) -> None:
        """Make compute wait until the time `end`."""
        self.now = max(self.now, end)
