"""The state of a search: what it found, what it left out, and how long it may go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from graphshard.format import human_bytes, human_seconds
from graphshard.progress import Progress, Stages
from graphshard.tune.bounds import Bound, Bounds
from graphshard.tune.extrapolate import Extrapolator
from graphshard.tune.limit import TimeLimit
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import BudgetRange, Candidate, CandidateGroup
from graphshard.tune.tuning import CandidateResult

EXHAUSTIVE = 1_500
"""A search is exhaustive if the captured program has at most this many nodes.

It then tries every group that its bounds allow; see `graphshard.tune.whole`.
"""


class _Shares(NamedTuple):
    """The shares of the time limit after which each part of a search ends."""

    bounds: float
    likely: float
    groups: float
    budgets: float


_ALL_WHOLE = _Shares(bounds=0.2, likely=0.6, groups=0.8, budgets=0.9)
"""Where the full model is simulated from the start."""


_EXTRAPOLATED = _Shares(bounds=0.15, likely=0.4, groups=0.5, budgets=0.65)
"""Where the best candidates are simulated whole after the rest."""


class Evaluator(Protocol):
    """Gives results of candidates: a `Simulator` of the model, or an `Extrapolator`."""

    def results(
        self, group: CandidateGroup, stop: Callable[[], bool] = ...
    ) -> list[CandidateResult]:
        """Return the results of all possible candidates of `group`, or those until `stop()`."""
        ...

    def result(self, candidate: Candidate) -> CandidateResult | None:
        """Return the result of `candidate`; None if the model cannot be sharded so."""
        ...

    def at_budget(self, budgets: BudgetRange, step: int) -> CandidateResult | None:
        """Return the result at `step` of `BUDGET_STEPS` steps through `budgets`."""
        ...

    def collect_garbage(self) -> None:
        """Collect unreachable objects of recent simulations."""
        ...


@dataclass
class SearchState:
    """The state of one search for the fastest candidate within `budget` bytes.

    results: by candidate, extrapolated if there is an `extrapolator`. full_results: those of the
    full model, by candidate. bounds: of each group. too_large, too_slow, impossible: groups that
    were not simulated, because their bound exceeds the budget or the best time, or because the
    model cannot be sharded so. limit: the time it may take. untried: candidates that
    stand for what it did not get to in that time. cut: whether it left anything out for the time.
    faster_than: seconds that a step must beat.
    """

    simulator: Simulator
    extrapolator: Extrapolator | None
    budget: int
    progress: Stages | None = None
    results: dict[Candidate, CandidateResult] = field(default_factory=dict)
    full_results: dict[Candidate, CandidateResult] = field(default_factory=dict)
    bounds: dict[CandidateGroup, Bound] = field(default_factory=dict)
    budget_bounds: dict[CandidateGroup, Bound] = field(default_factory=dict)
    too_large: list[CandidateGroup] = field(default_factory=list)
    too_slow: list[CandidateGroup] = field(default_factory=list)
    impossible: list[CandidateGroup] = field(default_factory=list)
    limit: TimeLimit = field(default_factory=TimeLimit)
    untried: list[Candidate] = field(default_factory=list)
    cut: bool = False
    faster_than: float | None = None

    def __post_init__(self) -> None:
        self.space = self.simulator.space
        self.evaluator: Evaluator = self.extrapolator or self.simulator
        self.shares = _ALL_WHOLE if self.extrapolator is None else _EXTRAPOLATED
        program = self.simulator.captures.like(self.simulator.plan(self._first()))
        self.exhaustive = self.extrapolator is None and len(program.graph.nodes) <= EXHAUSTIVE

    def _first(self) -> Candidate:
        return next(iter(self.space.candidates(self.space.groups()[0])))

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the time is over, so that something is left out."""
        self.cut |= (passed := self.limit.passed(share))
        return passed

    def to_beat(self) -> float:
        """The seconds that a candidate must beat: those of the best so far, or `faster_than`."""
        best = self.best(self.results.values())
        limit = inf if self.faster_than is None else self.faster_than
        return limit if best is None else min(limit, best.seconds)

    def best(self, results: Iterable[CandidateResult]) -> CandidateResult | None:
        """Return the fastest of `results` that fits.

        Times that differ by a millionth count as equal. Among equals a policy without a budget goes
        first, then one without recomputation, then the smaller.
        """
        fitting = [result for result in results if result.peak <= self.budget]
        if not fitting:
            return None
        fastest = min(result.seconds for result in fitting)
        equal = [result for result in fitting if result.seconds <= fastest * (1 + 1e-6)]

        def simplest(result: CandidateResult) -> tuple[bool, bool, int]:
            group = result.candidate.group
            return group.budget is not None, group.recompute is not None, result.peak

        return min(equal, key=simplest)

    def find_bounds(self, bounds: Bounds) -> None:
        """Fill `self.bounds`, for as many groups as its share of the time allows."""
        groups = self.space.groups()
        with self.stage("bounds", len(groups)):
            for group in groups:
                if self.bounds and self.over(self.shares.bounds):
                    self.untried.append(self.space.likeliest(group))
                else:
                    self.bounds[group] = bounds.of(group)
                self.advance()

    def record(self, results: Iterable[CandidateResult | None]) -> None:
        """Keep `results`, and tell of a new best one."""
        before = self.best(self.results.values())
        for result in results:
            if result is not None:
                self.results[result.candidate] = result
        best = self.best(self.results.values())
        if best is not None and best != before and isinstance(self.progress, Progress):
            self.progress.tell(
                f"best so far: {human_seconds(best.seconds)} a step, {human_bytes(best.peak)}, "
                f"{self.space.policy(best.candidate)!r}"
            )

    # -- progress ---------------------------------------------------------------------------------

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """Show a stage of the search with `total` steps; see `Progress.stage`."""
        return nullcontext() if self.progress is None else self.progress.stage(name, total)

    def advance(self) -> None:
        """Count one step of the stage as done."""
        if self.progress is not None:
            self.progress.advance()
