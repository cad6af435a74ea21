"""The result of tuning: the policy, its estimate, and why the others are not better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphshard.cost.estimate import Estimate
from graphshard.format import human_bytes, human_seconds
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.program.storages import KINDS
from graphshard.tune.space import Candidate

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class PolicyResult:
    """The seconds of a step and the peak bytes of a simulated policy.

    whole: whether the full model was simulated; if not, the figures are extrapolated from models
    with fewer blocks.
    """

    policy: Policy
    seconds: float
    bytes: int
    whole: bool

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "policy": repr(self.policy),
            "seconds": self.seconds,
            "bytes": self.bytes,
            "whole": self.whole,
        }


@dataclass(frozen=True)
class Tuning:
    """The result of `AutoPolicy.tune`.

    Attributes:
        policy: the chosen policy, explicit.
        estimate: the estimate of a step under it; its plan has the verified program.
        memory_budget: the bytes it had to fit in.
        frontier: the policies simulated in full that no other beats in both time and memory, the
            fastest first.
        tried: all simulated policies, the fastest first.
        reasons: why policies that differ in one field are not better, by that field.
        groups: number of groups of policies (each with several ways to issue gathers) that were
            "simulated", and that were skipped because they cannot fit ("too large"), cannot be
            faster ("too slow"), or are "impossible".
        simulations: number of simulated programs.
    """

    policy: Policy
    estimate: Estimate
    memory_budget: int
    frontier: tuple[PolicyResult, ...]
    tried: tuple[PolicyResult, ...]
    reasons: Mapping[str, str]
    groups: Mapping[str, int]
    simulations: int

    @property
    def plan(self) -> ShardingPlan:
        """The plan of the policy, with its program."""
        return self.estimate.plan

    @property
    def code(self) -> str:
        """The policy as code; evaluate it after `import graphshard, torch`."""
        return repr(self.policy)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "policy": self.policy.to_dict(),
            "code": self.code,
            "memory_budget": self.memory_budget,
            "estimate": self.estimate.to_dict(),
            "frontier": [entry.to_dict() for entry in self.frontier],
            "tried": [entry.to_dict() for entry in self.tried],
            "reasons": dict(self.reasons),
            "groups": dict(self.groups),
            "simulations": self.simulations,
        }

    def __str__(self) -> str:
        estimate = self.estimate
        skipped = ", ".join(f"{count} {why}" for why, count in self.groups.items() if count)
        lines = [
            self.code,
            "",
            f"step       {human_seconds(estimate.step_seconds)}, of which "
            f"{human_seconds(estimate.exposed_seconds)} exposed communication; "
            f"{estimate.mfu:.1%} of the peak (MFU)",
            f"memory     peak {human_bytes(estimate.peak_bytes)} of "
            f"{human_bytes(self.memory_budget)}",
            f"hardware   {estimate.hardware}, {estimate.plan.world_size:,} ranks",
            f"searched   {self.simulations:,} simulations; kinds of policies: {skipped}",
            "",
            "time and memory, simulated whole:",
        ]
        best = self.frontier[0].seconds
        for entry in self.frontier:
            longer = entry.seconds / best - 1
            mark = "  chosen" if entry.policy == self.policy else ""
            time, size = human_seconds(entry.seconds), human_bytes(entry.bytes)
            lines.append(f"  {time:>8}  {longer:+7.1%}  {size:>10}  {entry.policy!r}{mark}")
        if self.reasons:
            lines += ["", "why not:"]
            lines += [f"  {what}: {why}" for what, why in self.reasons.items()]
        return "\n".join(lines)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


@dataclass(frozen=True)
class CandidateResult:
    """The seconds and bytes of a step under one candidate.

    peak: peak bytes. compute, communication: seconds. step_bytes: peak bytes as
    `Policy.memory_budget` counts them. valley: least bytes. at_peak: bytes at the peak by category.
    whole: whether the full model was simulated; if not, the figures are extrapolated.
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
    def of(cls, candidate: Candidate, estimate: Estimate) -> CandidateResult:
        """Return the result of `candidate` from its `estimate`."""
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

    def extrapolated(self, deeper: CandidateResult, share: float) -> CandidateResult:
        """Extrapolate linearly by `share` times the difference between this result and `deeper`."""

        def line(a: float, b: float) -> float:
            return a + share * (b - a)

        kinds = {**self.at_peak, **deeper.at_peak}
        at_peak = {
            kind: max(0, round(line(self.at_peak.get(kind, 0), deeper.at_peak.get(kind, 0))))
            for kind in kinds
        }
        return CandidateResult(
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
