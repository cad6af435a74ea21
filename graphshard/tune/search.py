"""The search: groups in the order of their bounds, then budgets, then the best in full."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from graphshard.errors import PolicyError
from graphshard.format import human_seconds
from graphshard.tune.bounds import Bounds
from graphshard.tune.extrapolate import extrapolator_of
from graphshard.tune.limit import TimeLimit
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import (
    BUDGET_STEPS,
    PLAIN,
    BudgetRange,
    Candidate,
    CandidateGroup,
    rounded,
)
from graphshard.tune.state import EXHAUSTIVE, SearchState
from graphshard.tune.tuning import CandidateResult
from graphshard.tune.whole import WholeSearch

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


class NotFasterError(PolicyError):
    """Policies fit, but no step of them is as fast as was asked for."""


@dataclass
class Search(SearchState):
    """One search for the fastest candidate within a budget of bytes; see `SearchState`."""

    @classmethod
    def of(cls, simulator: Simulator, budget: int, limit: TimeLimit) -> Search:
        """Return a search that extrapolates if the model is large, with many equal blocks."""
        space = simulator.space
        plan = simulator.plan(space.candidates(space.groups()[0])[0])
        extrapolator = None
        if len(simulator.captures.like(plan).graph.nodes) > EXHAUSTIVE:
            extrapolator = extrapolator_of(simulator.model, simulator.captures, space)
        return cls(simulator, extrapolator, budget, limit=limit)

    def run(self) -> CandidateResult | None:
        """Return the fastest candidate that fits, simulated in full; None if none fits.

        Raises:
            NotFasterError: there is none as fast as `faster_than`.
        """
        if self.exhaustive:
            WholeSearch(self).run()
        else:
            self._simulate_groups()
            self._simulate_budgets()
        if self.extrapolator is None:
            self.full_results = dict(self.results)
            winner = self.best(self.full_results.values())
        else:
            winner = self._simulate_finalists()
        limit = self.faster_than
        if limit is not None:
            left_out = winner is None and self.too_slow and not self.untried
            if left_out or (winner is not None and winner.seconds >= limit):
                raise NotFasterError(f"no step takes less than {human_seconds(limit)}")
        return winner

    # -- every group, by its bound --------------------------------------------------------------

    def _simulate_groups(self) -> None:
        self.find_bounds(Bounds(self.simulator, self.extrapolator))
        order = sorted(self.bounds, key=lambda group: self.bounds[group].seconds)
        with self.stage("simulate candidates", len(order)):
            for group in order:
                self.advance()
                if not self.space.is_default(group):
                    continue
                if self.results and self.over(self.shares.groups):
                    self.untried.append(self.space.likeliest(group))
                elif self._is_promising(group):
                    self.record(self._likeliest(group))
                    self.evaluator.collect_garbage()
        self._expand()

    def _all(self, group: CandidateGroup) -> list[CandidateResult]:
        return self.evaluator.results(group, lambda: self.over(self.shares.groups))

    def _likeliest(self, group: CandidateGroup) -> list[CandidateResult]:
        result = self.evaluator.result(self.space.likeliest(group))
        return [] if result is None else [result]

    def _expand(self) -> None:
        """Try neighbours of the best so far: other shardings, then all ways to issue gathers."""
        for group in self._leading_groups():
            for other in self.bounds:
                same_rest = replace(other, sharding=group.sharding) == group
                same_strategy = other.sharding.strategy is group.sharding.strategy
                if not (same_rest and same_strategy) or self.space.is_default(other):
                    continue
                if self.over(self.shares.groups):
                    self.untried.append(self.space.likeliest(other))
                elif self._is_promising(other):
                    self.record(self._likeliest(other))
                    self.evaluator.collect_garbage()
        for group in self._leading_groups():
            self.record(self._all(group))
            self.evaluator.collect_garbage()

    def _leading_groups(self) -> list[CandidateGroup]:
        """The groups of the fastest candidates that may fit."""
        ranked = sorted(self.results.values(), key=lambda result: (result.seconds, result.peak))
        fitting = [result for result in ranked if result.peak <= _SLACK * self.budget]
        return list(dict.fromkeys(result.candidate.group for result in fitting))[:_EXPANDED]

    def _is_promising(self, group: CandidateGroup) -> bool:
        """Whether a candidate of `group` may be the best; record the reason if not."""
        bound = self.bounds[group]
        if not bound.possible:
            self.impossible.append(group)
        elif bound.bytes > self.budget:
            self.too_large.append(group)
        elif bound.seconds > self.to_beat():
            self.too_slow.append(group)
        else:
            return True
        return False

    # -- budgets ----------------------------------------------------------------------------------

    def _simulate_budgets(self) -> None:
        """Try partial recomputation of groups that do not fit without recomputation."""
        if not self.space.tries_budgets:
            return
        groups = [group for group in self.bounds if self._needs_budgets(group)]
        with self.stage("simulate budgets", len(groups)):
            ranked: list[tuple[float, int, Candidate]] = []
            for index, group in enumerate(groups):
                self.advance()
                if self.over(self.shares.budgets):
                    self.untried.append(self.space.likeliest(group))
                    continue
                results = self._likeliest(group)
                if self.space.schedules[-1] != PLAIN:
                    overlap = Candidate(group, schedule=self.space.schedules[-1])
                    results += filter(None, [self.evaluator.result(overlap)])
                self.record(results)
                self.evaluator.collect_garbage()
                fitting = [result for result in results if result.peak <= self.budget]
                if fitting:  # full recomputation has the lowest peak
                    best = min(fitting, key=lambda result: (result.seconds, result.peak))
                    ranked.append((best.seconds, index, best.candidate))
            ranked.sort(key=lambda entry: entry[:2])
            for _, _, candidate in ranked[:_BUDGETED]:
                self._search_budgets(self.space.budgets(candidate))
                self.evaluator.collect_garbage()

    def _search_budgets(self, budgets: BudgetRange) -> None:
        """Bisect `budgets` for the highest that fits.

        Skip if recomputing nothing fits or is too slow, since no budget is faster than that.
        """
        fastest = self.evaluator.result(budgets.recompute_none)
        best = self.best(self.results.values())
        if fastest is None or fastest.peak <= self.budget:
            return
        if best is not None and fastest.seconds >= best.seconds:
            return
        low, high = 1, BUDGET_STEPS
        while low < high and not self.over(self.shares.budgets):
            step = (low + high) // 2
            result = self.evaluator.at_budget(budgets, step)
            self.record([result])
            if result is None or result.peak > self.budget:
                high = step
            else:
                low = step + 1

    def _needs_budgets(self, group: CandidateGroup) -> bool:
        """Whether `group` recomputes everything and its budgets may be better than the best."""
        if group.recompute != self.space.recompute_all or not self.bounds[group].possible:
            return False
        if group.offload is not None and "activations" in group.offload:
            return False
        if not self.space.is_default(group):
            return False
        bound = self.bounds.get(replace(group, recompute=None))
        best = self.best(self.results.values())
        return bound is not None and (best is None or bound.seconds <= best.seconds)

    # -- the full model ---------------------------------------------------------------------------

    def _simulate_finalists(self) -> CandidateResult | None:
        ranked = sorted(self.results.values(), key=lambda result: (result.seconds, result.peak))
        likely = [result for result in ranked if result.peak <= _SLACK * self.budget]
        self.simulator.estimates = {}  # keep estimates: the winner's is part of the `Tuning`
        with self.stage("simulate the best whole"):
            for count, result in enumerate(likely):
                best = self.best(self.full_results.values())
                if best is not None and (
                    self.over()
                    or count >= _FINALISTS
                    or result.seconds >= best.seconds * (1 - _MIN_GAIN)
                ):
                    break
                self._simulate_near(result)
            best = self.best(self.full_results.values())
            if best is not None:
                for result in self._smaller_results(ranked, best):
                    if not self.over():
                        self._simulate_near(result, fit=False)
        return best

    def _simulate_near(self, result: CandidateResult, *, fit: bool = True) -> None:
        """Simulate an extrapolated candidate in full; with `fit`, adjust its budget to fit."""
        candidate = result.candidate
        full_result = self.simulate_full(candidate)
        for _ in range(3):
            budget = candidate.group.budget
            if not fit or budget is None or full_result is None:
                return
            left = self.budget - full_result.peak
            if 0 <= left <= 0.01 * self.budget:
                return
            new_budget = rounded(budget + left - (self.budget // 1000 if left < 0 else 0))
            candidate = replace(candidate, group=replace(candidate.group, budget=new_budget))
            full_result = self.simulate_full(candidate)

    def simulate_full(self, candidate: Candidate) -> CandidateResult | None:
        """Return the result of `candidate` for the full model, and keep it among those."""
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


def frontier_of(results: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Return the results that no other beats in both time and memory, the fastest first."""
    frontier: list[CandidateResult] = []
    for result in sorted(results, key=lambda result: (result.seconds, result.peak)):
        if not frontier or result.peak < frontier[-1].peak:
            frontier.append(result)
    return frontier
