"""The result of tuning: the policy, its estimate, and why the others are not better."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.memory import SHARD_GRADIENTS
from graphshard.format import human_bytes, human_seconds, sentence
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy, policy_code
from graphshard.program.storages import END, KINDS
from graphshard.tune.space import Candidate

if TYPE_CHECKING:
    from rich.console import RenderableType


EQUAL = 1e-3
"""Policies whose times differ by at most this share are equal, and the simplest is chosen."""


_SHOWN = 5
"""The number of policies without a result that a text shows."""


@dataclass(frozen=True)
class PolicyResult:
    """The seconds of a step and the peak bytes of a simulated policy."""

    policy: Policy
    seconds: float
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "policy": repr(self.policy),
            "seconds": self.seconds,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class Tuning:
    """The result of `AutoPolicy.tune`.

    Attributes:
        policy: the chosen policy, explicit.
        estimate: the estimate of a step under it; its plan has the verified program.
        memory_budget: the bytes it had to fit in.
        frontier: the chosen policy, then those that need less memory, the fastest first.
        tried: all simulated policies, the fastest first.
        reasons: why policies that differ in one field are not better, by that field.
        groups: number of groups of policies (each with several ways to issue gathers) that were
            "simulated", and that were skipped because they cannot fit ("too large"), cannot be
            faster ("too slow"), are "impossible", or that there was no time for ("not tried").
        simulations: number of simulated programs.
        untried: of each group that there was no time for, a policy.
        micro_batches: calls of forward and backward in a step; `estimate` is of one of them.
        stopped_after: the limit in seconds by which the search ended early; None if it did not.
        further_bytes: of communicators and workspaces that the budget leaves no room for; see
            `Space.further_bytes`.
    """

    policy: Policy
    estimate: Estimate
    memory_budget: int
    frontier: tuple[PolicyResult, ...]
    tried: tuple[PolicyResult, ...]
    reasons: Mapping[str, str]
    groups: Mapping[str, int]
    simulations: int
    untried: tuple[Policy, ...] = ()
    stopped_after: float | None = None
    micro_batches: int = 1
    further_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of all micro-batches."""
        return _step_seconds(self.estimate, self.micro_batches)

    @property
    def bytes(self) -> int:
        """The most bytes that torch reserves, on hosts that are alive; the budget bounds them.

        `further_bytes` are among them.
        """
        kept = _gradient_bytes(self.estimate) if self.micro_batches > 1 else 0
        return self.estimate.reserved_bytes + kept + self.further_bytes

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
            "micro_batches": self.micro_batches,
            "step_seconds": self.step_seconds,
            "estimate": self.estimate.to_dict(),
            "frontier": [entry.to_dict() for entry in self.frontier],
            "tried": [entry.to_dict() for entry in self.tried],
            "reasons": dict(self.reasons),
            "groups": dict(self.groups),
            "simulations": self.simulations,
            "untried": [repr(policy) for policy in self.untried],
            "stopped_after": self.stopped_after,
            "further_bytes": self.further_bytes,
        }

    def __str__(self) -> str:
        estimate = self.estimate
        skipped = ", ".join(f"{count} {why}" for why, count in self.groups.items() if count)
        of_step = further = ""
        if self.micro_batches > 1:
            seconds = human_seconds(self.step_seconds)
            of_step = f"{seconds} for {self.micro_batches} micro-batches; of one "
        if self.further_bytes:
            more = human_bytes(self.further_bytes)
            further = f" and {more} for further communicators or workspaces"
        lines = [
            wrapped(self.code),
            "",
            f"step       {of_step}{human_seconds(estimate.step_seconds)}, of which "
            f"{human_seconds(estimate.exposed_seconds)} exposed communication; "
            f"{estimate.mfu:.1%} of the peak (MFU)",
            f"memory     {human_bytes(self.bytes - self.further_bytes)} {taken(estimate)}"
            f"{further}, of {human_bytes(self.memory_budget)}",
            f"hardware   {estimate.hardware}, {estimate.plan.world_size:,} ranks",
            f"searched   {self.simulations:,} simulations; kinds of policies: {skipped}",
            *self._not_tried(),
            "",
            "time and memory:",
        ]
        best = self.frontier[0].seconds
        for entry in self.frontier:
            longer = entry.seconds / best - 1
            mark = "  chosen" if entry.policy == self.policy else ""
            time, size = human_seconds(entry.seconds), human_bytes(entry.bytes)
            slower = f"{longer:+.1%}" if abs(longer) > EQUAL else "equal"
            row = f"  {time:>8}  {slower:>7}  {size:>10}  {brief(entry.policy)}{mark}"
            lines.append(wrapped(row, 35))
        if self.reasons:
            lines += ["", "why not:"]
            lines += [sentence(f"{what}: {why}", "  ") for what, why in self.reasons.items()]
        return "\n".join(lines)

    def _not_tried(self) -> list[str]:
        """Lines on what there was no time for."""
        if self.stopped_after is None:
            return []
        shown = [wrapped(f"{'':13}{brief(policy)}", 17) for policy in self.untried[:_SHOWN]]
        among = ", among others" if len(self.untried) > len(shown) else ""
        rest = f"; not tried{among}:" if shown else ""
        stopped = (
            f"stopped    by the limit of {self.stopped_after:g} s, in time to verify the best so "
            f"far; more time may find a better one{rest}"
        )
        return [sentence(stopped), *shown]

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


_SHARED = ("hardware", "memory_budget", "mixed_precision")
"""Fields that a search sets and does not choose."""


def brief(policy: Policy) -> str:
    """`policy` as code that is read, not pasted: without package and shared fields."""
    return policy_code(policy, without=_SHARED).replace("graphshard.", "")


def wrapped(code: str, indent: int = 4, columns: int = 120) -> str:
    """`code` in lines of at most `columns`, if no argument is longer, broken between keywords."""
    lines = [""]
    for part in re.split(r"(?<=,) (?=\w+=)", code):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > columns:
            lines.append(" " * indent + part)
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def _step_seconds(estimate: Estimate, micro_batches: int) -> float:
    return estimate.step_seconds + (micro_batches - 1) * estimate.timeline.seconds


def _gradient_bytes(estimate: Estimate) -> int:
    """Bytes of the reduced gradients that outlive a step's backward."""
    storages = estimate.memory.storages
    return sum(s.size for s in storages if s.kind == SHARD_GRADIENTS and s.dies >= END)


def taken(estimate: Estimate) -> str:
    """Words for the bytes of `estimate` that a budget bounds."""
    return "at the peak" if estimate.reserved is None else "reserved"


@dataclass(frozen=True)
class CandidateResult:
    """The seconds and bytes of a step under one candidate.

    peak: the most bytes that torch reserves, on hosts that are alive, and those beside them that
    the budget leaves no room for (`Space.further_bytes`). compute: seconds. step_bytes: peak bytes
    as `Policy.memory_budget` counts them. at_peak: bytes at the peak by category.
    """

    candidate: Candidate
    seconds: float
    peak: int
    compute: float
    step_bytes: int
    at_peak: Mapping[str, int]

    @property
    def exposed(self) -> float:
        """Seconds of communication that compute waits for."""
        return max(0.0, self.seconds - self.compute)

    @classmethod
    def of(
        cls, candidate: Candidate, estimate: Estimate, micro_batches: int = 1, further: int = 0
    ) -> CandidateResult:
        """Return the result of `candidate` from its `estimate`, of one of so many micro-batches.

        `further` bytes count against the budget beside those that torch reserves.

        Each of them reduces its gradients, so from the second on those of the ones before are held.
        """
        points = estimate.memory.points
        once = estimate.optimizer_seconds + estimate.hardware.step_overhead
        compute = micro_batches * (estimate.compute_seconds - once) + once
        at_peak = dict(estimate.memory.peak.by_category)
        kept = _gradient_bytes(estimate) if micro_batches > 1 else 0
        if kept:
            at_peak[SHARD_GRADIENTS] = at_peak.get(SHARD_GRADIENTS, 0) + kept
        return cls(
            candidate,
            _step_seconds(estimate, micro_batches),
            estimate.reserved_bytes + kept + further,
            compute,
            max(sum(point.by_category.get(kind, 0) for kind in KINDS) for point in points),
            at_peak,
        )
