"""What simulating one candidate showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.cost.estimate import Estimate
from graphshard.step_memory import KINDS
from graphshard.tune.space import Candidate


@dataclass(frozen=True)
class Outcome:
    """Time and memory of a step under one candidate: seconds and bytes.

    step_bytes: the most it holds at once as `Policy.memory_budget` counts. at_peak: what is held at
    the peak, by category. whole: the model itself was simulated; if not, the figures were drawn out
    from those of the same model with fewer blocks.
    """

    candidate: Candidate
    seconds: float
    peak: int
    compute: float
    communication: float
    step_bytes: int
    valley: int
    at_peak: Mapping[str, int]
    whole: bool = True

    @property
    def exposed(self) -> float:
        """Seconds of communication that compute waits for."""
        return max(0.0, self.seconds - self.compute)

    @classmethod
    def of(cls, candidate: Candidate, estimate: Estimate) -> Outcome:
        """What `estimate` says."""
        points = estimate.memory.points
        return cls(
            candidate,
            estimate.step_seconds,
            estimate.peak_bytes,
            estimate.compute_seconds,
            estimate.communication_seconds,
            max(sum(point.by_category.get(kind, 0) for kind in KINDS) for point in points),
            estimate.valley_bytes,
            dict(estimate.memory.peak.by_category),
        )

    def drawn_out(self, deeper: Outcome, share: float) -> Outcome:
        """The line through this and `deeper`, followed `share` times their distance past this."""

        def line(a: float, b: float) -> float:
            return a + share * (b - a)

        kinds = {**self.at_peak, **deeper.at_peak}
        at_peak = {
            kind: max(0, round(line(self.at_peak.get(kind, 0), deeper.at_peak.get(kind, 0))))
            for kind in kinds
        }
        return Outcome(
            self.candidate,
            line(self.seconds, deeper.seconds),
            round(line(self.peak, deeper.peak)),
            line(self.compute, deeper.compute),
            line(self.communication, deeper.communication),
            round(line(self.step_bytes, deeper.step_bytes)),
            round(line(self.valley, deeper.valley)),
            at_peak,
            whole=False,
        )
