"""Timing many small works in turn, until their times agree.

All works are timed once per round, so that a machine that drifts drifts for all alike. What counts
is the median over rounds: a disturbed round costs nothing. Works whose times are spread go on for
more rounds, up to a cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Protocol

import torch


class Work(Protocol):
    """What is timed.

    group: its kind, for progress. wall: time passes, not only this thread's work, as where ranks
    wait for each other.
    """

    group: str
    wall: bool

    def run(self, times: int) -> None:
        """Do it `times` times, one after the other."""


class Ranks(Protocol):
    """The ranks that measure together (see `graphshard.runtime.group.Group`)."""

    size: int

    def everyones(self, value: Any) -> list[Any]:
        """The `value` of every rank, in order."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    least, most: rounds. spread: relative interquartile range at which a work is done. piece:
    seconds that one timing of a work should take at least. budget: seconds after which no further
    round begins once `least` are done.
    """

    least: int = 5
    most: int = 15
    spread: float = 0.05
    piece: float = 5e-4
    budget: float = 40.0


QUICK = Effort(least=3, most=3, piece=1e-4, budget=5.0)
"""For a rough idea."""


@dataclass
class Timing:
    """What was measured of one work: seconds of each round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range, as a part of the median."""
        if len(self.rounds) < 3:
            return 0.0
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.seconds


@dataclass(frozen=True)
class Watch:
    """Times work on `device`."""

    device: torch.device

    def __call__(self, work: Work, times: int) -> float:
        """Seconds per run of `work`, over `times` runs.

        On one CPU thread this is the thread's own time, which other processes cannot take.
        """
        own = self.device.type == "cpu" and not work.wall and torch.get_num_threads() == 1
        clock = time.thread_time if own else time.perf_counter
        clocked = getattr(work, "clocked", None)
        if clocked is not None:  # only a part of it counts
            return float(clocked(times, clock))
        self.settle()
        begin = clock()
        work.run(times)
        self.settle()
        return (clock() - begin) / times

    def settle(self) -> None:
        """Wait for what was launched on an accelerator."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    works: Sequence[Work],
    watch: Watch,
    ranks: Ranks,
    effort: Effort,
    done: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time `works` on all `ranks` at once, each rank in the same order.

    Args:
        works: what to time.
        watch: how.
        ranks: who takes part.
        effort: for how long.
        done: called after each timing.

    Returns:
        One per work; its seconds are the mean over the ranks' medians.
    """
    begin = time.perf_counter()
    counts = []
    with torch.no_grad():
        for work in works:
            work.run(1)  # whatever happens once
            once = max(watch(work, 1), 1e-7)
            counts.append(max(1, round(effort.piece / once)))
            done()
        counts = [max(each) for each in zip(*ranks.everyones(counts), strict=True)]
        timings = [Timing() for _ in works]
        left = list(range(len(works)))
        for turn in range(effort.most):
            for index in left:
                timings[index].rounds.append(watch(works[index], counts[index]))
                done()
            if turn + 1 < effort.least:
                continue
            spread = [i for i in left if timings[i].spread > effort.spread]
            late = time.perf_counter() - begin > effort.budget
            heard = ranks.everyones((spread, late))
            # Ranks agree on what comes next: some of it they do together.
            left = sorted({index for wanted, _ in heard for index in wanted})
            if not left or any(is_late for _, is_late in heard):
                break
    return _mean_over(ranks, timings)


def _mean_over(ranks: Ranks, timings: list[Timing]) -> list[Timing]:
    rounds = ranks.everyones([timing.rounds for timing in timings])
    if len(rounds) == 1:
        return timings
    return [
        Timing([sum(each) / len(each) for each in zip(*(sorted(r) for r in of_work), strict=True)])
        for of_work in zip(*rounds, strict=True)
    ]
