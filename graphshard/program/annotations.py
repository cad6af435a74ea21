"""Results of single passes that a program carries: regions, byte budget, CUDA graphs, a pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphshard.format import some_of
from graphshard.hardware.hardware import Hardware


@dataclass(frozen=True)
class Regions:
    """Summary of the compiled regions of a program.

    Attributes:
        forms: for each region, the number of the first region of the same form.
        counts: for each region, its number of operators without views.
        left: number of operators in no region, without views.
        fell_back: the reason for each region that is not compiled but runs operator by operator,
            by the region's label; filled when the regions are compiled.
    """

    forms: tuple[int, ...]
    counts: tuple[int, ...]
    left: int
    fell_back: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def distinct(self) -> int:
        """The number of different forms."""
        return len(set(self.forms))

    def __str__(self) -> str:
        """One line for the plan: regions, operators, distinct forms, and fallbacks."""
        texts = [
            f"{len(self.forms):,} of {sum(self.counts):,} operators, {self.distinct:,} distinct",
            f"{self.left:,} operators in none",
        ]
        by_reason: dict[str, list[str]] = {}
        for where, reason in self.fell_back.items():
            by_reason.setdefault(reason, []).append(where)
        texts += [f"{some_of(where)} fell back: {why}" for why, where in by_reason.items()]
        return "; ".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data, ready for JSON."""
        return {
            "regions": len(self.forms),
            "distinct": self.distinct,
            "operators": sum(self.counts),
            "operators_in_none": self.left,
            "fell_back": dict(self.fell_back),
        }


DEFAULT_HARDWARE = {"cuda": "h100-sxm", "cpu": "cpu-gloo"}
"""The hardware preset for timing if the policy names none, by the type of the captured device."""


@dataclass(frozen=True)
class Score:
    """The quality of a program: seconds of forward and backward, and peak bytes."""

    seconds: float
    bytes: int

    def beats(self, other: Score) -> bool:
        """Whether this is faster than `other`, or as fast and smaller.

        Times within a billionth count as equal, since they are sums in different orders.
        """
        slack = 1e-9 * max(self.seconds, other.seconds)
        if abs(self.seconds - other.seconds) > slack:
            return self.seconds < other.seconds
        return self.bytes < other.bytes


@dataclass(frozen=True)
class CudaGraphs:
    """Whether a step is captured as CUDA graphs, or the reason why not."""

    why_not: str | None  # None if it is captured
    graphs: int = 2  # forward, and backward if there is one

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"none, since {self.why_not}"
        return "one for forward" + (" and one for backward" if self.graphs == 2 else "")


@dataclass(frozen=True)
class Budget:
    """The byte budget that scheduling must keep, and the hardware that steps are timed on.

    Attributes:
        bytes: the most bytes that a step may hold at once. With `of_policy`, the policy's
            `memory_budget`, counted as that field says. Otherwise the peak of the same program in
            FSDP's order, counted as in `graphshard.cost.memory` without the memory that stays
            between steps, but with communication buffers and reduced gradients.
        hardware: the hardware to time on.
        of_policy: whether the policy sets `memory_budget`.
        unchanged_because: the reason the program stays in FSDP's order; None if it does not.
        room: peak bytes that sharding adds to the program in FSDP's order: unsharded parameters,
            gradients to reduce and, without `of_policy`, communication buffers.
        sharding: the same peak in the order that `Overlap` chose; None before that.
    """

    bytes: int
    hardware: Hardware
    of_policy: bool
    unchanged_because: str | None = None
    room: int = 0
    sharding: int | None = None

    @property
    def backend(self) -> str:
        """The communication backend whose buffers are counted."""
        return "gloo" if "gloo" in self.hardware.name else "nccl"

    def allows(self, score: Score) -> bool:
        """Whether a program with this score keeps the budget."""
        return score.bytes <= self.bytes

    def prefers(self, score: Score, other: Score) -> bool:
        """Whether a program with `score` is better than one with `other`.

        A program within the budget beats one above it. Within the budget time decides, then bytes;
        above it, bytes alone.
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
            "kept": self.unchanged_because,
            "sharding_bytes": self.sharding,
        }

    def __str__(self) -> str:
        why = "memory_budget" if self.of_policy else "as FSDP's order needs"
        reason = f"; {self.unchanged_because}" if self.unchanged_because else ""
        sharding = f", {self.sharding:,} for sharding" if self.sharding is not None else ""
        return (
            f"overlap, timed on {self.hardware.name}, holds at most {self.bytes:,} bytes at once "
            f"({why}){sharding}{reason}"
        )
