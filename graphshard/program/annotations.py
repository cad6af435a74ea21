"""What a program scheduled by cost is bound by: bytes, and the hardware it is timed on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphshard.format import some_of
from graphshard.hardware.hardware import Hardware


@dataclass(frozen=True)
class Regions:
    """The regions of a program, for whoever wants to know of them.

    forms: of each region the number of the first one of its form. counts: the operators in each,
    views left out. left: the operators in none. fell_back: why some regions run operator by
    operator although they should be compiled, by what they are; known once they were to run.
    """

    forms: tuple[int, ...]
    counts: tuple[int, ...]
    left: int
    fell_back: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def distinct(self) -> int:
        """How many forms there are."""
        return len(set(self.forms))

    def __str__(self) -> str:
        """As the plan says it: so many of so many operators, how many distinct, what fell back."""
        said = [
            f"{len(self.forms):,} of {sum(self.counts):,} operators, {self.distinct:,} distinct",
            f"{self.left:,} operators in none",
        ]
        by_reason: dict[str, list[str]] = {}
        for where, reason in self.fell_back.items():
            by_reason.setdefault(reason, []).append(where)
        said += [f"{some_of(where)} fell back: {why}" for why, where in by_reason.items()]
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "regions": len(self.forms),
            "distinct": self.distinct,
            "operators": sum(self.counts),
            "operators_in_none": self.left,
            "fell_back": dict(self.fell_back),
        }


DEFAULT_HARDWARE = {"cuda": "h100-sxm", "cpu": "cpu-gloo"}
"""What a step is timed on if the policy does not say, by the kind of device it was captured for."""


@dataclass(frozen=True)
class Score:
    """How good a program is: seconds of forward and backward, and the most bytes held at once."""

    seconds: float
    bytes: int

    def beats(self, other: Score) -> bool:
        """Whether this is faster than `other`, or as fast and smaller.

        Times that differ by a billionth are equal: they are sums in another order.
        """
        slack = 1e-9 * max(self.seconds, other.seconds)
        if abs(self.seconds - other.seconds) > slack:
            return self.seconds < other.seconds
        return self.bytes < other.bytes


@dataclass(frozen=True)
class CudaGraphs:
    """Whether a step is captured as CUDA graphs, and why not."""

    why_not: str | None  # None: it is
    graphs: int = 2  # forward, and backward where there is one

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"none, since {self.why_not}"
        return "one for forward" + (" and one for backward" if self.graphs == 2 else "")


@dataclass(frozen=True)
class Budget:
    """The most bytes a step may hold at once while it is scheduled, and what it is timed on.

    bytes: with `of_policy`, the policy's memory_budget, which counts what that field says.
        Otherwise what the same program needs in FSDP's order, counted as in
        `graphshard.cost.memory` without what stays between steps: communication buffers and reduced
        gradients too.
    kept: why the program stands in FSDP's order all the same, None if it does not.
    best: the score that `Overlap` would reach with the program as it is, None if not known.
    room: the most bytes that the program in FSDP's order holds at once for sharding's sake:
        unsharded parameters, gradients to reduce and (but with `of_policy`) buffers of collectives.
    sharding: the most that the program `Overlap` made holds so; None before that.
    """

    bytes: int
    hardware: Hardware
    of_policy: bool
    kept: str | None = None
    best: Score | None = None
    room: int = 0
    sharding: int | None = None

    @property
    def backend(self) -> str:
        """The backend whose buffers count."""
        return "gloo" if "gloo" in self.hardware.name else "nccl"

    def allows(self, score: Score) -> bool:
        """Whether a program of this score keeps the budget."""
        return score.bytes <= self.bytes

    def prefers(self, score: Score, other: Score) -> bool:
        """Whether a program of `score` is to be taken instead of one of `other`.

        Keeping the budget comes first, then time, then bytes; where both break it, bytes alone.
        """
        if self.allows(score) and self.allows(other):
            return score.beats(other)
        return self.allows(score) or (not self.allows(other) and score.bytes < other.bytes)

    def to_dict(self) -> dict[str, Any]:
        """The budget as plain data, ready for JSON."""
        return {
            "hardware": self.hardware.name,
            "budget_bytes": self.bytes,
            "of_policy": self.of_policy,
            "kept": self.kept,
            "sharding_bytes": self.sharding,
        }

    def __str__(self) -> str:
        why = "memory_budget" if self.of_policy else "as FSDP's order needs"
        kept = f"; {self.kept}" if self.kept else ""
        sharding = f", {self.sharding:,} for sharding" if self.sharding is not None else ""
        return (
            f"overlap, timed on {self.hardware.name}, holds at most {self.bytes:,} bytes at once "
            f"({why}){sharding}{kept}"
        )
