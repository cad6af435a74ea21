"""recompute to a budget: as little is computed again as makes the step fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from graphshard.errors import PolicyError
from graphshard.passes.recompute import recompute_checkpoints, require_calls, rewrite
from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import (
    PassLike,
    RehearsingPass,
    Stage,
    apply_passes,
    stages_of,
)
from graphshard.program.program import RECOMPUTED, Program
from graphshard.program.storages import storages_of
from graphshard.recompute.min_cut import Choice
from graphshard.recompute.peak import LifetimeChanges, PeakModel, ShardingBytes
from graphshard.recompute.problem import Frontiers, RegionProblem, forward_cost, region_problems
from graphshard.recompute.regions import Reads, reads_of_calls


@dataclass(frozen=True)
class RecomputeToBudget(RehearsingPass):
    """Recompute what costs least, so that the step never holds more than `budget` bytes.

    A region is a call of a unit or of a class named, or the root's own code. Minimum cuts give its
    choices between saving everything and saving the fewest bytes; regions take their next choice in
    the order of cost (FLOPs) per byte saved until the budget holds. See README.md of
    `graphshard/recompute`.

    Args:
        budget: bytes.
        classes: the calls of the modules in `plan.recomputed` are the regions.
        memo: where what does not depend on the budget is kept, for passes that differ in nothing
            else and are applied to copies of one program.
    """

    budget: int
    classes: bool = False
    memo: list[_Rehearsal] | None = field(default=None, compare=False, repr=False)
    name: ClassVar[str] = "recompute"

    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The passes that decide what parameters and gradients hold: up to `Stage.FREED`."""
        for place, step in enumerate(following):
            if Stage.FREED in stages_of(step):
                return tuple(following[: place + 1])
        return tuple(following)

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        """See `RehearsingPass.apply_before`.

        Raises:
            PolicyError: the step holds more than the budget even if all that may is recomputed;
                says the least budget found that would do.
            PassError: see `Recompute`.
        """
        recompute_checkpoints(program, self.name)
        if not program.grad:
            return
        if self.classes:
            require_calls(program, plan)
        targets = set(plan.recomputed) if self.classes else {unit.fqn for unit in plan.units}
        again, note = self._rehearsal(program, plan, targets, rest).choice(self.budget)
        self._issue_again(program, targets, again)
        program.notes = (*program.notes, note)

    def _rehearsal(
        self, program: Program, plan: ShardingPlan, targets: set[str], rest: Sequence[PassLike]
    ) -> _Rehearsal:
        """The rehearsal, on a copy, that the choice for any budget follows from."""
        if self.memo is None:
            return self._rehearse(program, plan, targets, rest)
        if not self.memo:
            self.memo.append(self._rehearse(program.copy(), plan, targets, rest))
        return self.memo[0]

    def _rehearse(
        self, program: Program, plan: ShardingPlan, targets: set[str], rest: Sequence[PassLike]
    ) -> _Rehearsal:
        def after_all(again: Set[str]) -> Program:
            """A copy in which the nodes of the names `again` are recomputed, after all passes."""
            copy = program.copy()
            self._issue_again(copy, targets, again)
            apply_passes(rest, copy, plan)
            return copy

        plain = max(storages_of(after_all(frozenset())).live(), default=0)

        def search() -> _Search:
            storages = storages_of(program)
            problems = region_problems(program, plan, targets, storages)
            frontiers = Frontiers()
            choices = [frontiers.of(problem.problem) for problem in problems]
            most = {
                node.name
                for problem, ladder in zip(problems, choices, strict=True)
                for node in problem.recomputed(ladder[-1])
            }
            held = ShardingBytes.of(program, after_all(most), RECOMPUTED)
            model = PeakModel(program, storages, [problem.reads for problem in problems], held)
            return _Search(model, problems, choices)

        return _Rehearsal(plain, forward_cost(program), search)

    def _issue_again(self, program: Program, targets: set[str], again: Set[str]) -> None:
        """Recompute the nodes of the names `again`."""
        order = {node: place for place, node in enumerate(program.graph.nodes)}
        for reads in list(reads_of_calls(program, targets)):
            rewrite(program, reads, lambda node: node.name in again, order, self.name)


class _Rehearsal:
    """What a step holds with nothing recomputed, and the search for what has to be."""

    def __init__(self, plain: int, forward: int, search: Callable[[], _Search]) -> None:
        self.plain, self.forward, self._make = plain, forward, search

    @cached_property
    def search(self) -> _Search:
        """Made when a budget needs it."""
        return self._make()

    def choice(self, budget: int) -> tuple[frozenset[str], str]:
        """The names of the nodes to issue again for `budget`, and a note that says what it costs.

        Raises:
            PolicyError: nothing will do.
        """
        if self.plain <= budget:
            return frozenset(), _note(budget, self.plain, "nothing is recomputed for it")
        search = self.search
        found = search.least_that_fits(budget)
        if found is None:
            raise PolicyError(
                f"the step cannot do with memory_budget={budget:,} bytes, whatever is "
                f"recomputed; {search.least:,} would do. Raise the budget, make "
                "smaller units, prefetch less, or use a smaller batch"
            )
        share = (
            f"{search.cost(found) / max(self.forward, 1):.1%} of forward's work is done once more"
        )
        return search.names(found), _note(budget, search.peak(found), share)


def _note(budget: int, peak: int, done: str) -> str:
    return f"memory_budget={budget:,}: the step holds {peak:,} bytes at most; {done}"


class _Search:
    """States of all regions, from saving everything, each one step of one region further."""

    def __init__(
        self,
        model: PeakModel,
        problems: Sequence[RegionProblem],
        choices: Sequence[Sequence[Choice]],
    ) -> None:
        self.model = model
        self.problems = problems
        self.choices = choices
        steps = [
            (Fraction(after.cost - before.cost, before.size - after.size), region)
            for region, ladder in enumerate(choices)
            for before, after in pairwise(ladder)
        ]
        self.steps = [region for _, region in sorted(steps)]
        self._moves: dict[tuple[int, int], LifetimeChanges] = {}
        self._peaks: dict[int, int] = {}

    def levels(self, steps: int) -> list[int]:
        """The choice of each region after the first `steps` steps."""
        levels = [0] * len(self.problems)
        for region in self.steps[:steps]:
            levels[region] += 1
        return levels

    def names(self, steps: int) -> frozenset[str]:
        """The names of the nodes recomputed after so many steps."""
        chosen = zip(self.problems, self.levels(steps), self.choices, strict=True)
        return frozenset(
            node.name
            for problem, level, ladder in chosen
            for node in problem.recomputed(ladder[level])
        )

    def cost(self, steps: int) -> int:
        """What is recomputed after so many steps, in FLOPs."""
        pairs = zip(self.choices, self.levels(steps), strict=True)
        return sum(ladder[level].cost for ladder, level in pairs)

    def peak(self, steps: int) -> int:
        """The most bytes held after so many steps."""
        if steps not in self._peaks:
            levels = enumerate(self.levels(steps))
            self._peaks[steps] = self.model.peak([self._moved(*level) for level in levels])
        return self._peaks[steps]

    def _moved(self, region: int, level: int) -> LifetimeChanges:
        if (region, level) not in self._moves:
            problem: RegionProblem = self.problems[region]
            reads: Reads = problem.reads
            again = problem.recomputed(self.choices[region][level])
            self._moves[region, level] = self.model.changes(reads, again)
        return self._moves[region, level]

    @cached_property
    def _samples(self) -> list[int]:
        """States tried when the last one, which saves the fewest bytes, does not hold the least.

        It need not, since what is recomputed is held too: of a large region all at once.
        """
        count = len(self.steps)
        return sorted({*range(0, count, max(1, count // 48)), count})

    @property
    def least(self) -> int:
        """The fewest bytes any of the states tried holds."""
        return min(map(self.peak, self._samples))

    def least_that_fits(self, budget: int) -> int | None:
        """The number of steps after which the step fits in `budget`, None if it never does."""
        last = len(self.steps)
        if self.peak(last) > budget:
            return next((n for n in self._samples if self.peak(n) <= budget), None)
        return bisect_left(range(last), True, key=lambda n: self.peak(n) <= budget)
