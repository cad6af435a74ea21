"""The search: groups in the order of their bounds, then budgets, then the best in full."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from graphshard.progress import Stages
from graphshard.tune.bounds import Bound, Bounds
from graphshard.tune.extrapolate import Extrapolator, extrapolator_of
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import BUDGET_STEPS, BudgetRange, Candidate, CandidateGroup, rounded
from graphshard.tune.tuning import CandidateResult

EXHAUSTIVE = 1_500
"""A search is exhaustive if the captured program has at most this many nodes.

It then simulates every group that its bounds allow.
"""


_FINALISTS = 4
"""Candidates with extrapolated results that are simulated in full, at least until one fits."""


_EXPANDED = 3
"""Groups whose candidates are all tried if the search is not exhaustive."""


_MIN_GAIN = 2e-3
"""Extrapolated candidates are simulated in full only if they are faster by this share."""


_BUDGETED = 2
"""Groups for which budgets are tried if the search is not exhaustive."""


_FRONTIER = 2
"""More candidates, with less memory, that are simulated in full to show the frontier."""


_SLACK = 1.02
"""Candidates are simulated in full if their extrapolated peak is at most this times the budget."""


class Evaluator(Protocol):
    """Gives results of candidates: a `Simulator` of the model, or an `Extrapolator`."""

    def results(self, group: CandidateGroup) -> list[CandidateResult]:
        """Return the results of all possible candidates of `group`."""
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
class Search:
    """One search for the fastest candidate within `budget` bytes.

    results: by candidate, extrapolated if there is an `extrapolator`. full_results: those of the
    full model, by candidate. bounds: of each group. too_large, too_slow, impossible: groups that
    were not simulated, because their bound exceeds the budget or the best time, or because the
    model cannot be sharded so.
    """

    simulator: Simulator
    extrapolator: Extrapolator | None
    budget: int
    progress: Stages | None = None
    results: dict[Candidate, CandidateResult] = field(default_factory=dict)
    full_results: dict[Candidate, CandidateResult] = field(default_factory=dict)
    bounds: dict[CandidateGroup, Bound] = field(default_factory=dict)
    too_large: list[CandidateGroup] = field(default_factory=list)
    too_slow: list[CandidateGroup] = field(default_factory=list)
    impossible: list[CandidateGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.space = self.simulator.space
        self.evaluator: Evaluator = self.extrapolator or self.simulator
        program = self.simulator.captures.like(self.simulator.plan(self._first()))
        self.exhaustive = self.extrapolator is None and len(program.graph.nodes) <= EXHAUSTIVE

    @classmethod
    def of(cls, simulator: Simulator, budget: int) -> Search:
        """Return a search that extrapolates if the model is large, with many equal blocks."""
        space = simulator.space
        plan = simulator.plan(space.candidates(space.groups()[0])[0])
        extrapolator = None
        if len(simulator.captures.like(plan).graph.nodes) > EXHAUSTIVE:
            extrapolator = extrapolator_of(simulator.model, simulator.captures, space)
        return cls(simulator, extrapolator, budget)

    def _first(self) -> Candidate:
        return next(iter(self.space.candidates(self.space.groups()[0])))

    def run(self) -> CandidateResult | None:
        """Return the fastest candidate that fits, simulated in full; None if none fits."""
        self._simulate_groups()
        self._simulate_budgets()
        if self.extrapolator is None:
            self.full_results = dict(self.results)
            return self.best(self.full_results.values())
        return self._simulate_finalists()

    def best(self, results: Iterable[CandidateResult]) -> CandidateResult | None:
        """Return the fastest of `results` that fits; ties go to the smaller, then the first.

        Times that differ by a millionth count as equal.
        """
        fitting = [result for result in results if result.peak <= self.budget]
        if not fitting:
            return None
        fastest = min(result.seconds for result in fitting)
        equal = [result for result in fitting if result.seconds <= fastest * (1 + 1e-6)]
        return min(equal, key=lambda result: result.peak)

    # -- every group, by its bound --------------------------------------------------------------

    def _simulate_groups(self) -> None:
        bounds = Bounds(self.simulator, self.extrapolator)
        groups = self.space.groups()
        with self._stage("bounds", len(groups)):
            for group in groups:
                self.bounds[group] = bounds.of(group)
                self._advance()
        order = sorted(groups, key=lambda group: self.bounds[group].seconds)
        with self._stage("simulate candidates", len(order)):
            for group in order:
                self._advance()
                if (self.exhaustive or self.space.is_default(group)) and self._is_promising(group):
                    self._record(self._probe(group))
                    self.evaluator.collect_garbage()
        if not self.exhaustive:
            self._expand()

    def _probe(self, group: CandidateGroup) -> list[CandidateResult]:
        """Return all results of `group` if exhaustive, else that of its likeliest candidate."""
        if self.exhaustive:
            return self.evaluator.results(group)
        results = [self.evaluator.result(candidate) for candidate in self.space.probes(group)]
        return [result for result in results if result is not None]

    def _expand(self) -> None:
        """Try neighbours of the best so far: other shardings, then all ways to issue gathers."""
        for group in self._leading_groups():
            for other in self.bounds:
                same_rest = replace(other, sharding=group.sharding) == group
                same_strategy = other.sharding.strategy is group.sharding.strategy
                if not (same_rest and same_strategy) or self.space.is_default(other):
                    continue
                if self._is_promising(other):
                    self._record(self._probe(other))
                    self.evaluator.collect_garbage()
        for group in self._leading_groups():
            self._record(self.evaluator.results(group))
            self.evaluator.collect_garbage()

    def _leading_groups(self) -> list[CandidateGroup]:
        """The groups of the fastest candidates that may fit."""
        ranked = sorted(self.results.values(), key=lambda result: (result.seconds, result.peak))
        fitting = [result for result in ranked if result.peak <= _SLACK * self.budget]
        return list(dict.fromkeys(result.candidate.group for result in fitting))[:_EXPANDED]

    def _is_promising(self, group: CandidateGroup) -> bool:
        """Whether a candidate of `group` may be the best; record the reason if not."""
        bound = self.bounds[group]
        best = self.best(self.results.values())
        if not bound.possible:
            self.impossible.append(group)
        elif bound.bytes > self.budget:
            self.too_large.append(group)
        elif best is not None and bound.seconds > best.seconds:
            self.too_slow.append(group)
        else:
            return True
        return False

    def _record(self, results: Iterable[CandidateResult]) -> None:
        for result in results:
            self.results[result.candidate] = result

    # -- budgets ----------------------------------------------------------------------------------

    def _simulate_budgets(self) -> None:
        """Try partial recomputation of groups that do not fit without recomputation."""
        if not self.space.tries_budgets:
            return
        groups = [group for group in self.bounds if self._needs_budgets(group)]
        with self._stage("simulate budgets", len(groups)):
            ranked: list[tuple[float, int, Candidate]] = []
            for index, group in enumerate(groups):
                self._advance()
                results = self._probe(group)
                self._record(results)
                self.evaluator.collect_garbage()
                plain = [r for r in results if r.candidate.schedule == "fsdp"] or results
                plain = [result for result in plain if result.peak <= self.budget]
                if plain:  # full recomputation has the lowest peak
                    best = min(plain, key=lambda result: (result.seconds, result.peak))
                    ranked.append((best.seconds, index, best.candidate))
            ranked.sort(key=lambda entry: entry[:2])
            for _, _, candidate in ranked if self.exhaustive else ranked[:_BUDGETED]:
                self._search_budgets(self.space.budgets(candidate))
                self.evaluator.collect_garbage()

    def _search_budgets(self, budgets: BudgetRange) -> None:
        """Try every step of `budgets` if exhaustive, else bisect for the highest that fits.

        Skip if recomputing nothing fits or is too slow, since no budget is faster than that.
        """
        fastest = self.evaluator.result(budgets.recompute_none)
        best = self.best(self.results.values())
        if fastest is None or fastest.peak <= self.budget:
            return
        if best is not None and fastest.seconds >= best.seconds:
            return
        low, high = 1, BUDGET_STEPS
        while low < high:
            step = high - 1 if self.exhaustive else (low + high) // 2
            result = self.evaluator.at_budget(budgets, step)
            if result is not None:
                self.results[result.candidate] = result
            if self.exhaustive or result is None or result.peak > self.budget:
                high = step
            else:
                low = step + 1

    def _needs_budgets(self, group: CandidateGroup) -> bool:
        """Whether `group` recomputes everything and its budgets may be better than the best."""
        if group.recompute != self.space.recompute_all or not self.bounds[group].possible:
            return False
        if group.offload is not None and "activations" in group.offload:
            return False
        if not self.exhaustive and not self.space.is_default(group):
            return False
        bound = self.bounds.get(replace(group, recompute=None))
        best = self.best(self.results.values())
        return bound is not None and (best is None or bound.seconds <= best.seconds)

    # -- the full model ---------------------------------------------------------------------------

    def _simulate_finalists(self) -> CandidateResult | None:
        ranked = sorted(self.results.values(), key=lambda result: (result.seconds, result.peak))
        likely = [result for result in ranked if result.peak <= _SLACK * self.budget]
        self.simulator.estimates = {}  # keep estimates: the winner's is part of the `Tuning`
        with self._stage("simulate the best whole"):
            for count, result in enumerate(likely):
                best = self.best(self.full_results.values())
                if best is not None and (
                    count >= _FINALISTS or result.seconds >= best.seconds * (1 - _MIN_GAIN)
                ):
                    break
                self._simulate_near(result)
            best = self.best(self.full_results.values())
            if best is not None:
                for result in self._smaller_results(ranked, best):
                    self._simulate_near(result, fit=False)
        return best

    def _simulate_near(self, result: CandidateResult, *, fit: bool = True) -> None:
        """Simulate an extrapolated candidate in full; with `fit`, adjust its budget to fit."""
        candidate = result.candidate
        full_result = self._simulate_full(candidate)
        for _ in range(3):
            budget = candidate.group.budget
            if not fit or budget is None or full_result is None:
                return
            left = self.budget - full_result.peak
            if 0 <= left <= 0.01 * self.budget:
                return
            new_budget = rounded(budget + left - (self.budget // 1000 if left < 0 else 0))
            candidate = replace(candidate, group=replace(candidate.group, budget=new_budget))
            full_result = self._simulate_full(candidate)

    def _simulate_full(self, candidate: Candidate) -> CandidateResult | None:
        result = self.simulator.result(candidate)
        gc.collect(1)
        if result is not None:
            self.full_results[candidate] = result
        return result

    def _smaller_results(
        self, ranked: list[CandidateResult], best: CandidateResult
    ) -> Iterator[CandidateResult]:
        """Yield some extrapolated results that need less memory than all faster ones."""
        frontier: list[CandidateResult] = []
        for result in ranked:
            if result.peak < min([best.peak, *(o.peak for o in frontier)]) * 0.98:
                frontier.append(result)
        step = max(1, -(-len(frontier) // _FRONTIER))
        yield from reversed(frontier[::-1][::step])

    # -- progress ---------------------------------------------------------------------------------

    def _stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self.progress is None else self.progress.stage(name, total)

    def _advance(self) -> None:
        if self.progress is not None:
            self.progress.advance()


def frontier_of(results: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Return the results that no other beats in both time and memory, the fastest first."""
    frontier: list[CandidateResult] = []
    for result in sorted(results, key=lambda result: (result.seconds, result.peak)):
        if not frontier or result.peak < frontier[-1].peak:
            frontier.append(result)
    return frontier
