"""Time many small benchmarks in rounds, until their times agree.

Every benchmark is timed once per round, so that a drift of the machine affects all alike, and the
median over rounds counts, so that a disturbed round has no effect. Benchmarks whose times vary get
more rounds, up to a cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Protocol

import torch

from graphshard.runtime.group import Group


class Benchmark(Protocol):
    """An operation to time.

    group: its kind, for reports. wall: whether to use wall time instead of this thread's CPU time,
    as for ranks that wait for each other.
    """

    group: str
    wall: bool

    def run(self, times: int) -> None:
        """Run it `times` times, one after the other."""


class Stopwatch(Protocol):
    """What times a benchmark: a clock of the host, or events of a device."""

    @property
    def most_runs(self) -> int:
        """Runs of one timing at most."""

    def __call__(self, benchmark: Benchmark, times: int) -> float:
        """Return the seconds per run, over `times` runs."""


@dataclass(frozen=True)
class Effort:
    """The duration of a measurement.

    least, most: number of rounds. spread: a benchmark is done at this relative interquartile range.
    piece: least seconds of one timing. budget: seconds after which no round begins, once `least`
    rounds are done.
    """

    least: int = 5
    most: int = 15
    spread: float = 0.05
    piece: float = 5e-4
    budget: float = 40.0


QUICK = Effort(least=3, most=3, piece=1e-4, budget=5.0)
"""The effort for a rough estimate."""


@dataclass
class Timing:
    """The measured seconds of one benchmark, for each round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range, as a fraction of the median."""
        if len(self.rounds) < 3:
            return 0.0
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.seconds


@dataclass(frozen=True)
class Watch:
    """A stopwatch for benchmarks on `device`, by a clock of the host."""

    device: torch.device
    most_runs: int = 1 << 20

    def __call__(self, benchmark: Benchmark, times: int) -> float:
        """Return the seconds per run of `benchmark`, over `times` runs.

        On one CPU thread this is the thread's CPU time, which other processes do not affect.
        """
        in_thread = (
            self.device.type == "cpu" and not benchmark.wall and torch.get_num_threads() == 1
        )
        clock = time.thread_time if in_thread else time.perf_counter
        timed_run = getattr(benchmark, "timed_run", None)
        if timed_run is not None:  # it times a part of itself
            return float(timed_run(times, clock))
        self.synchronize()
        begin = clock()
        benchmark.run(times)
        self.synchronize()
        return (clock() - begin) / times

    def synchronize(self) -> None:
        """Wait for all kernels on an accelerator."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    benchmarks: Sequence[Benchmark],
    watch: Stopwatch,
    ranks: Group,
    effort: Effort,
    done: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time `benchmarks` on all `ranks` at once, in the same order on each rank.

    The timings, one per benchmark, are averaged over ranks. `done` is called after each timing.
    """
    begin = time.perf_counter()
    counts = []
    with torch.no_grad():
        for benchmark in benchmarks:
            benchmark.run(1)  # warm up
            seconds = max(watch(benchmark, 1), 1e-7)
            counts.append(min(watch.most_runs, max(1, round(effort.piece / seconds))))
            done()
        counts = [max(each) for each in zip(*ranks.all_gather_object(counts), strict=True)]
        timings = [Timing() for _ in benchmarks]
        remaining = list(range(len(benchmarks)))
        for turn in range(effort.most):
            for index in remaining:
                timings[index].rounds.append(watch(benchmarks[index], counts[index]))
                done()
            if turn + 1 < effort.least:
                continue
            spread = [i for i in remaining if timings[i].spread > effort.spread]
            late = time.perf_counter() - begin > effort.budget
            reports = ranks.all_gather_object((spread, late))
            # All ranks must go on with the same benchmarks: some include collectives.
            remaining = sorted({index for indices, _ in reports for index in indices})
            if not remaining or any(is_late for _, is_late in reports):
                break
    return _mean_over(ranks, timings)


def _mean_over(ranks: Group, timings: list[Timing]) -> list[Timing]:
    rounds = ranks.all_gather_object([timing.rounds for timing in timings])
    if len(rounds) == 1:
        return timings
    return [
        Timing([sum(each) / len(each) for each in zip(*(sorted(r) for r in of_work), strict=True)])
        for of_work in zip(*rounds, strict=True)
    ]
