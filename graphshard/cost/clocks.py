"""The clocks of a step's streams, the same for a timeline, a schedule and an order to be scored."""

from __future__ import annotations


class Clocks:
    """When compute and each other stream are free, in seconds after the step began.

    Compute nodes run one after the other. A collective or a copy between device and host starts
    once its stream is free and compute has reached the place that launches it. Compute goes slower
    by the hardware's `contention` while any of them is under way.

    now: when compute is free. ends: when each other stream is free, by its name. busy_until: when
    the last of all that is launched ends.
    """

    __slots__ = ("busy_until", "contention", "ends", "now")

    def __init__(self, contention: float) -> None:
        self.contention = contention
        self.now = self.busy_until = 0.0
        self.ends: dict[str, float] = {}

    @property
    def end(self) -> float:
        """When all streams are free."""
        return max([self.now, *self.ends.values()])

    def compute(self, seconds: float) -> None:
        """Run `seconds` of compute, longer where other streams take a part of its speed."""
        contended = self.busy_until - self.now
        if seconds and self.contention and contended > 0:
            speed = 1 - self.contention
            done = contended * speed  # seconds of work that get done meanwhile
            seconds = seconds / speed if done >= seconds else contended + seconds - done
        self.now += seconds

    def launch(self, stream: str, seconds: float) -> float:
        """Occupy `stream` for `seconds`, from when it is free.

        Returns:
            When that ends.
        """
        end = max(self.now, self.ends.get(stream, 0.0)) + seconds
        self.ends[stream] = end
        self.busy_until = max(self.busy_until, end)
        return end

    def wait(self, end: float) -> None:
        """Let compute wait until `end`."""
        self.now = max(self.now, end)
