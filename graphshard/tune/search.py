"""The search: groups in the order of their bounds, then budgets, then the best of them whole."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from graphshard.progress import Stages
from graphshard.tune.bounds import Bound, Bounds
from graphshard.tune.shallow import Shallow, shallow_of
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import RUNGS, Candidate, Group, Ladder, rounded
from graphshard.tune.tuning import Outcome

EXHAUSTIVE = 1_500
"""Nodes of a captured program up to which every group that its bounds allow is simulated."""


_FINALISTS = 4
"""Candidates simulated whole after shallow models found them, until one of them fits."""


_EXPANDED = 3
"""Groups of which all candidates are tried where not all of all groups are."""


_WORTH = 2e-3
"""The part of a step's time that a drawn out one must gain to be simulated whole, too."""


_LADDERS = 2
"""Groups for which budgets are tried where not all are."""


_FRONTIER = 2
"""Further candidates, of less memory, simulated whole to show the frontier."""


_SLACK = 1.02
"""A drawn out peak may be this much above the budget and its candidate still be tried."""


class Quick(Protocol):
    """What outcomes are asked of first: the model, or smaller ones like it."""

    def outcomes(self, group: Group) -> list[Outcome]:
        """Of all candidates of `group`."""
        ...

    def outcome(self, candidate: Candidate) -> Outcome | None:
        """Of `candidate`, None if the model cannot be sharded so."""
        ...

    def rung(self, ladder: Ladder, step: int) -> Outcome | None:
        """Of the rung `step` of `ladder`."""
        ...

    def sweep(self) -> None:
        """Collect what is not needed any more."""
        ...


@dataclass
class Search:
    """One search in `budget` bytes.

    tried: every outcome, by candidate, first those drawn out of smaller models. whole: those of the
    model itself. bounds: of each group. too_large, too_slow, impossible: groups that were not
    simulated, as their bound is past the budget, or no better than what was found, or the model
    cannot be sharded so.
    """

    simulator: Simulator
    shallow: Shallow | None
    budget: int
    progress: Stages | None = None
    tried: dict[Candidate, Outcome] = field(default_factory=dict)
    whole: dict[Candidate, Outcome] = field(default_factory=dict)
    bounds: dict[Group, Bound] = field(default_factory=dict)
    too_large: list[Group] = field(default_factory=list)
    too_slow: list[Group] = field(default_factory=list)
    impossible: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.space = self.simulator.space
        self.quick: Quick = self.shallow or self.simulator
        program = self.simulator.captures.like(self.simulator.plan(self._first()))
        self.exhaustive = self.shallow is None and len(program.graph.nodes) <= EXHAUSTIVE

    @classmethod
    def of(cls, simulator: Simulator, budget: int) -> Search:
        """A search with smaller models, if `simulator` has a large one of many equal blocks."""
        space = simulator.space
        plan = simulator.plan(space.candidates(space.groups()[0])[0])
        large = len(simulator.captures.like(plan).graph.nodes) > EXHAUSTIVE
        shallow = shallow_of(simulator.model, simulator.captures, space) if large else None
        return cls(simulator, shallow, budget)

    def _first(self) -> Candidate:
        return next(iter(self.space.candidates(self.space.groups()[0])))

    def run(self) -> Outcome | None:
        """The fastest candidate that fits, simulated whole; None if none was found that fits."""
        self._coarse()
        self._ladders()
        if self.shallow is None:
            self.whole = dict(self.tried)
            return self.best(self.whole.values())
        return self._finals()

    def best(self, outcomes: Iterable[Outcome], slack: float = 1.0) -> Outcome | None:
        """The fastest of `outcomes` that fits; of equally fast ones the smallest, then the first.

        Times that differ by a millionth are equal.
        """
        fitting = [outcome for outcome in outcomes if outcome.peak <= slack * self.budget]
        if not fitting:
            return None
        fastest = min(outcome.seconds for outcome in fitting)
        equal = [o for o in fitting if o.seconds <= fastest * (1 + 1e-6)]
        return min(equal, key=lambda outcome: outcome.peak)

    # -- every group, by its bound --------------------------------------------------------------

    def _coarse(self) -> None:
        bounds = Bounds(self.simulator, self.shallow)
        groups = self.space.groups()
        with self._stage("bounds", len(groups)):
            for group in groups:
                self.bounds[group] = bounds.of(group)
                self._advance()
        order = sorted(groups, key=lambda group: self.bounds[group].seconds)
        with self._stage("simulate candidates", len(order)):
            for group in order:
                self._advance()
                if (self.exhaustive or self.space.plain(group)) and self._worth(group):
                    self._try(self._probed(group))
                    self.quick.sweep()
        if not self.exhaustive:
            self._expand()

    def _probed(self, group: Group) -> list[Outcome]:
        """The outcomes of `group`; where not all are tried, of gathers one unit ahead."""
        if self.exhaustive:
            return self.quick.outcomes(group)
        found = [self.quick.outcome(candidate) for candidate in self.space.probes(group)]
        return [outcome for outcome in found if outcome is not None]

    def _expand(self) -> None:
        """Try what is close to the best so far: other shardings, then all ways to issue gathers."""
        for group in self._leading():
            for other in self.bounds:
                same = replace(other, sharding=group.sharding) == group
                near = other.sharding.strategy is group.sharding.strategy
                if same and near and not self.space.plain(other) and self._worth(other):
                    self._try(self._probed(other))
                    self.quick.sweep()
        for group in self._leading():
            self._try(self.quick.outcomes(group))
            self.quick.sweep()

    def _leading(self) -> list[Group]:
        """The groups of the fastest that may fit."""
        ranked = sorted(self.tried.values(), key=lambda outcome: (outcome.seconds, outcome.peak))
        fitting = [outcome for outcome in ranked if outcome.peak <= _SLACK * self.budget]
        return list(dict.fromkeys(outcome.candidate.group for outcome in fitting))[:_EXPANDED]

    def _worth(self, group: Group) -> bool:
        """Whether `group` may hold what is better than all tried, and why not, if not."""
        bound = self.bounds[group]
        best = self.best(self.tried.values())
        if not bound.possible:
            self.impossible.append(group)
        elif bound.bytes > self.budget:
            self.too_large.append(group)
        elif best is not None and bound.seconds > best.seconds:
            self.too_slow.append(group)
        else:
            return True
        return False

    def _try(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.tried[outcome.candidate] = outcome

    # -- budgets ----------------------------------------------------------------------------------

    def _ladders(self) -> None:
        """Recompute a part: where nothing recomputed does not fit, and all of it takes longer."""
        if not self.space.tries_budgets:
            return
        wanted = [group for group in self.bounds if self._climbs(group)]
        with self._stage("simulate budgets", len(wanted)):
            ranked: list[tuple[float, int, Candidate]] = []
            for index, group in enumerate(wanted):
                self._advance()
                outcomes = self._probed(group)
                self._try(outcomes)
                self.quick.sweep()
                plain = [o for o in outcomes if o.candidate.schedule == "fsdp"] or outcomes
                plain = [outcome for outcome in plain if outcome.peak <= self.budget]
                if plain:  # no rung holds less
                    best = min(plain, key=lambda o: (o.seconds, o.peak))
                    ranked.append((best.seconds, index, best.candidate))
            ranked.sort(key=lambda entry: entry[:2])
            for _, _, candidate in ranked if self.exhaustive else ranked[:_LADDERS]:
                self._climb(self.space.ladder(candidate))
                self.quick.sweep()

    def _climb(self, ladder: Ladder) -> None:
        """Try the rungs of `ladder`; where not all are tried, to find the highest that fits.

        No rung is faster than recomputing nothing.
        """
        most, best = self.quick.outcome(ladder.most), self.best(self.tried.values())
        if most is None or most.peak <= self.budget:
            return
        if best is not None and most.seconds >= best.seconds:
            return
        low, high = 1, RUNGS
        while low < high:
            step = high - 1 if self.exhaustive else (low + high) // 2
            outcome = self.quick.rung(ladder, step)
            if outcome is not None:
                self.tried[outcome.candidate] = outcome
            if self.exhaustive or outcome is None or outcome.peak > self.budget:
                high = step
            else:
                low = step + 1

    def _climbs(self, group: Group) -> bool:
        """Whether budgets of `group`, which recomputes all, may be better than what was found."""
        if group.recompute != self.space.everything or not self.bounds[group].possible:
            return False
        if group.offload is not None and "activations" in group.offload:
            return False
        if not self.exhaustive and not self.space.plain(group):
            return False
        none = self.bounds.get(replace(group, recompute=None))
        best = self.best(self.tried.values())
        return none is not None and (best is None or none.seconds <= best.seconds)

    # -- the model itself -------------------------------------------------------------------------

    def _finals(self) -> Outcome | None:
        ranked = sorted(self.tried.values(), key=lambda outcome: (outcome.seconds, outcome.peak))
        likely = [outcome for outcome in ranked if outcome.peak <= _SLACK * self.budget]
        self.simulator.estimates = {}  # that of the winner is handed out
        with self._stage("simulate the best whole"):
            for count, outcome in enumerate(likely):
                best = self.best(self.whole.values())
                if best is not None and (
                    count >= _FINALISTS or outcome.seconds >= best.seconds * (1 - _WORTH)
                ):
                    break
                self._confirm(outcome)
            best = self.best(self.whole.values())
            if best is not None:
                for outcome in self._smaller(ranked, best):
                    self._confirm(outcome, fit=False)
        return best

    def _confirm(self, outcome: Outcome, *, fit: bool = True) -> None:
        """Simulate whole what was drawn out; move a budget to where the step just fits."""
        candidate = outcome.candidate
        found = self._simulated(candidate)
        for _ in range(3):
            budget = candidate.group.budget
            if not fit or budget is None or found is None:
                return
            left = self.budget - found.peak
            if 0 <= left <= 0.01 * self.budget:
                return
            moved = rounded(budget + left - (self.budget // 1000 if left < 0 else 0))
            candidate = replace(candidate, group=replace(candidate.group, budget=moved))
            found = self._simulated(candidate)

    def _simulated(self, candidate: Candidate) -> Outcome | None:
        found = self.simulator.outcome(candidate)
        gc.collect(1)
        if found is not None:
            self.whole[candidate] = found
        return found

    def _smaller(self, ranked: list[Outcome], best: Outcome) -> Iterator[Outcome]:
        """Some of those drawn out that need less memory than any faster one, evenly chosen."""
        frontier: list[Outcome] = []
        for outcome in ranked:
            if outcome.peak < min([best.peak, *(o.peak for o in frontier)]) * 0.98:
                frontier.append(outcome)
        step = max(1, -(-len(frontier) // _FRONTIER))
        yield from reversed(frontier[::-1][::step])

    # -- shown ------------------------------------------------------------------------------------

    def _stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self.progress is None else self.progress.stage(name, total)

    def _advance(self) -> None:
        if self.progress is not None:
            self.progress.advance()


def frontier_of(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that no other beats in both time and memory, the fastest first."""
    found: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.seconds, outcome.peak)):
        if not found or outcome.peak < found[-1].peak:
            found.append(outcome)
    return found
