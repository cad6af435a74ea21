"""recompute_budget: recompute as little as makes the step fit a byte budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise, takewhile
from typing import ClassVar

from torch import fx

from graphshard.errors import PolicyError
from graphshard.passes.recompute import (
    draws_to_repeat,
    recompute_checkpoints,
    require_calls,
    rewrite,
)
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
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
from graphshard.recompute.peak import LifetimeChanges, PeakModel, ShardingBytes
from graphshard.recompute.problem import (
    Choice,
    RegionProblem,
    forward_cost,
    frontier,
    region_problems,
)
from graphshard.recompute.redraw import replay_draws
from graphshard.recompute.regions import Reads, reads_of_calls


def _moves_apart(step: PassLike) -> bool:
    return isinstance(step, (SplitGathers, SplitReduces))


@dataclass(frozen=True)
class RecomputeToBudget(RehearsingPass):
    """Recompute the cheapest values so that the step never holds more than `budget` bytes.

    A region is a call of a unit or of a named class, or the root's own code. Minimum cuts give each
    region's choices between saving all values and saving the fewest bytes. Regions take their next
    choice in the order of FLOPs per byte saved until the budget holds. See README.md of
    `graphshard/recompute`.

    Args:
        budget: peak memory of a step in bytes.
        classes: the calls of the modules in `plan.recomputed` are the regions.
        keep_draws: see `Recompute`.
        memo: an empty list that caches the rehearsal, for passes that differ only in `budget` and
            are applied to copies of one program.
    """

    budget: int
    classes: bool = False
    keep_draws: bool = False
    memo: list[_Rehearsal] | None = field(default=None, compare=False, repr=False)
    name: ClassVar[str] = "recompute"

    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The passes that decide how long parameters and gradients live.

        Those up to `Stage.FREED`, and those behind them that move parts of a unit apart.
        """
        for place, step in enumerate(following):
            if Stage.FREED in stages_of(step):
                apart = takewhile(_moves_apart, following[place + 1 :])
                return (*following[: place + 1], *apart)
        return tuple(following)

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        targets, drawn = self._begin(program, plan)
        if not program.grad:
            return
        if self.classes:
            require_calls(program, plan)
        names, note = self._rehearsal(program, plan, targets, drawn, rest).choice(self.budget)
        self._issue_again(program, targets, names)
        program.notes = (*program.notes, note)

    def chosen(
        self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]
    ) -> frozenset[str]:
        """The names of the nodes that `apply_before` would recompute in a captured `program`."""
        if self.memo:
            return self.memo[0].choice(self.budget)[0]
        program = program.copy()
        targets, drawn = self._begin(program, plan)
        return self._rehearsal(program, plan, targets, drawn, rest).choice(self.budget)[0]

    def _begin(self, program: Program, plan: ShardingPlan) -> tuple[set[str], Set[fx.Node]]:
        """Recompute the model's checkpoints; return the modules to recompute, and the draws."""
        targets = set(plan.recomputed) if self.classes else {unit.fqn for unit in plan.units}
        drawn = draws_to_repeat(program, targets, self.keep_draws)
        recompute_checkpoints(program, drawn)
        return targets, drawn

    def _rehearsal(
        self,
        program: Program,
        plan: ShardingPlan,
        targets: set[str],
        drawn: Set[fx.Node],
        rest: Sequence[PassLike],
    ) -> _Rehearsal:
        """The rehearsal that decides the choice for any budget; cached in `memo`, if given."""
        names = frozenset(draw.name for draw in drawn)
        if self.memo is None:
            return self._rehearse(program, plan, targets, names, rest)
        if not self.memo:
            self.memo.append(self._rehearse(program.copy(), plan, targets, names, rest))
        return self.memo[0]

    def _rehearse(
        self,
        program: Program,
        plan: ShardingPlan,
        targets: set[str],
        drawn: Set[str],
        rest: Sequence[PassLike],
    ) -> _Rehearsal:
        def after_all(names: Set[str]) -> Program:
            """A copy of the program that recomputes the nodes with these names, after `rest`."""
            copy = program.copy()
            self._issue_again(copy, targets, names)
            apply_passes(rest, copy, plan)
            return copy

        plain = max(storages_of(after_all(frozenset())).live(), default=0)

        def search() -> _Search:
            storages = storages_of(program)
            problems = region_problems(program, plan, targets, storages, drawn)
            once = cache(frontier)  # regions of equal structure have equal problems
            choices = [once(problem.problem) for problem in problems]
            all_names = {
                node.name
                for problem, ladder in zip(problems, choices, strict=True)
                for node in problem.recomputed(ladder[-1])
            }
            fixed = ShardingBytes.of(program, after_all(all_names), RECOMPUTED)
            model = PeakModel(program, storages, [problem.reads for problem in problems], fixed)
            return _Search(model, problems, choices)

        return _Rehearsal(plain, forward_cost(program), search)

    def _issue_again(self, program: Program, targets: set[str], names: Set[str]) -> None:
        """Recompute the nodes with these names."""
        order = {node: place for place, node in enumerate(program.graph.nodes)}
        for reads in list(reads_of_calls(program, targets)):
            rewrite(program, reads, lambda node: node.name in names, order)
        if not self.keep_draws:
            replay_draws(program)


class _Rehearsal:
    """The peak of a step that recomputes nothing, and the search for values to recompute.

    Args:
        plain: peak bytes of that step.
        forward: FLOPs of forward.
        search: makes the search.
    """

    def __init__(self, plain: int, forward: int, search: Callable[[], _Search]) -> None:
        self.plain, self.forward, self._make_search = plain, forward, search

    @cached_property
    def search(self) -> _Search:
        """The search, made when a budget first needs it."""
        return self._make_search()

    def choice(self, budget: int) -> tuple[frozenset[str], str]:
        """The names of the nodes to recompute for `budget`, and a note on the cost."""
        if self.plain <= budget:
            return frozenset(), _note(budget, self.plain, "nothing is recomputed for it")
        search = self.search
        steps = search.least_that_fits(budget)
        if steps is None:
            raise PolicyError(
                f"the step does not fit memory_budget={budget:,} bytes, whatever is recomputed; "
                f"the smallest budget found that fits is {search.least:,} bytes. Raise the budget, "
                "make smaller units, prefetch less, or use a smaller batch"
            )
        share = (
            f"{search.cost(steps) / max(self.forward, 1):.1%} of forward's work is done once more"
        )
        return search.names(steps), _note(budget, search.peak(steps), share)


def _note(budget: int, peak: int, done: str) -> str:
    return f"memory_budget={budget:,}: the step holds {peak:,} bytes at most; {done}"


class _Search:
    """A sequence of states from saving all values; each step takes one region's next choice."""

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
        """The names of the nodes recomputed after the first `steps` steps."""
        chosen = zip(self.problems, self.levels(steps), self.choices, strict=True)
        return frozenset(
            node.name
            for problem, level, ladder in chosen
            for node in problem.recomputed(ladder[level])
        )

    def cost(self, steps: int) -> int:
        """FLOPs recomputed after the first `steps` steps."""
        pairs = zip(self.choices, self.levels(steps), strict=True)
        return sum(ladder[level].cost for ladder, level in pairs)

    def peak(self, steps: int) -> int:
        """Peak bytes after the first `steps` steps."""
        if steps not in self._peaks:
            levels = enumerate(self.levels(steps))
            self._peaks[steps] = self.model.peak([self._moves_of(*level) for level in levels])
        return self._peaks[steps]

    def _moves_of(self, region: int, level: int) -> LifetimeChanges:
        if (region, level) not in self._moves:
            problem: RegionProblem = self.problems[region]
            reads: Reads = problem.reads
            recomputed = problem.recomputed(self.choices[region][level])
            self._moves[region, level] = self.model.changes(reads, recomputed)
        return self._moves[region, level]

    @cached_property
    def _samples(self) -> list[int]:
        """Numbers of steps to try if the last state, which saves the fewest bytes, does not fit.

        The last state may not have the lowest peak, since recomputed values are held too, for a
        large region all at once.
        """
        count = len(self.steps)
        return sorted({*range(0, count, max(1, count // 48)), count})

    @property
    def least(self) -> int:
        """The lowest peak bytes among the states tried."""
        return min(map(self.peak, self._samples))

    def least_that_fits(self, budget: int) -> int | None:
        """The fewest steps after which the peak fits in `budget`; None if it never does."""
        last = len(self.steps)
        if self.peak(last) > budget:
            return next((n for n in self._samples if self.peak(n) <= budget), None)
        return bisect_left(range(last), True, key=lambda n: self.peak(n) <= budget)
