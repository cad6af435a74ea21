"""The search of a model that is simulated whole: best first, by lower bounds.

Candidates are tried in the order of the least time that they may take, and no more once that is not
below the best time found. Of the candidates of a group, those that differ in where gathers are
issued, the one with the most prefetching is tried first: where it is too slow, or fits, the others
are left out, unless it is nearly the best. Where it is fast and too large, the one with the least
prefetching says whether any fits.

FSDP's order goes first, since `schedule="overlap"` takes ten times as long to simulate: that is
tried where it may win by `_GAIN`. Where recomputation is to be chosen, FSDP's order also finds the
budget within which a step just fits, and "overlap" starts from there. It then decides itself what
to prefetch and which units to keep after forward, so other shardings of the same strategy are left
to `schedule="fsdp"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphshard.tune.bounds import Bound, Bounds
from graphshard.tune.room import largest_room
from graphshard.tune.space import PLAIN, Candidate, CandidateGroup
from graphshard.tune.state import SearchState

TOLERANCE = 5e-4
"""Groups whose bound is not below the best time by this share are left out."""


_GAIN = 0.05
"""The share by which "overlap" may be faster than FSDP's order; no bound, see README.md."""


_CLOSE = 1.01
"""Groups this much slower than the best are tried with every way to issue gathers."""


_NEARLY_FITS = 1.02
"""Other ways to issue gathers may fit where a step needs this much of the memory."""


_OVERLAP_MAY_FIT = 1.1
"""Where FSDP's order needs this much of the memory, "overlap" may fit."""


_TRIES = 12
"""The most simulations in FSDP's order in which a budget is adjusted."""


_SLOW_TRIES = 4
"""The most simulations in which a budget is adjusted under "overlap"."""


_LEFT = 3e-3
"""A budget under "overlap" is adjusted no further if this share of the memory is left."""


@dataclass(frozen=True)
class _Task:
    """One thing to try: the candidates of `group` with one `schedule`.

    room: give the step all bytes there are, as a budget for its schedule or recomputation.
    """

    group: CandidateGroup
    schedule: str
    room: bool
    bound: Bound


class WholeSearch:
    """One search; its results and what was left out are those of `search`."""

    def __init__(self, search: SearchState) -> None:
        self.search, self.space = search, search.space
        self.bounds = Bounds(search.simulator)
        self.rooms: dict[CandidateGroup, int] = {}
        """The largest budget within which FSDP's order fits, of groups that recompute all."""

    def run(self) -> None:
        """Try every task that its bound allows, until the time is over."""
        search = self.search
        search.find_bounds(self.bounds)
        tasks = sorted(self._tasks(), key=lambda task: task.bound.seconds)
        quick = [task for task in tasks if task.schedule == PLAIN]
        slow = [task for task in tasks if task.schedule != PLAIN]
        self._look_around(quick or slow)
        with search.stage("simulate candidates", len(tasks)):
            self._try_all(quick)
            self._try_all(sorted(slow, key=self._expected))
        self._try_close_issues()
        self._simplify()

    def _try_all(self, tasks: list[_Task]) -> None:
        search = self.search
        for task in tasks:
            search.advance()
            if not self._is_promising(task):
                self._leave_out(task)
            elif search.results and search.over(search.shares.groups):
                search.untried.append(self._untried(task))
            else:
                self._try(task)
                search.evaluator.collect_garbage()

    # -- what to try ------------------------------------------------------------------------------

    def _tasks(self) -> Iterator[_Task]:
        search, slow = self.search, self.space.schedules[-1]
        for group, bound in search.bounds.items():
            if not bound.possible:
                search.impossible.append(group)
                continue
            if bound.bytes <= search.budget:
                if PLAIN in self.space.schedules:
                    yield _Task(group, PLAIN, False, bound.of_schedule(PLAIN))
                if slow != PLAIN and self.space.is_default(group):
                    room = not self.space.tries_budgets
                    yield _Task(group, slow, room, bound.of_schedule(slow))
            else:
                search.too_large.append(group)
            if self.space.tries_budgets and self._may_have_budgets(group):
                # Whatever is recomputed, a step takes no less than with nothing recomputed.
                least = replace(search.bounds[replace(group, recompute=None)], bytes=0)
                search.budget_bounds[group] = least
                yield _Task(group, PLAIN, True, least)
                if slow != PLAIN:
                    yield _Task(group, slow, True, least.of_schedule(slow))

    def _may_have_budgets(self, group: CandidateGroup) -> bool:
        """Whether `group` recomputes all, so that budgets between that and nothing are tried."""
        if group.recompute != self.space.recompute_all:
            return False
        if replace(group, recompute=None) not in self.search.bounds:
            return False  # there was no time for its bound
        if self.space.schedules[-1] != PLAIN and not self.space.is_default(group):
            return False
        return group.offload is None or "activations" not in group.offload

    def _is_promising(self, task: _Task) -> bool:
        bound, to_beat = task.bound, self.search.to_beat() * (1 - TOLERANCE)
        if not bound.possible or bound.bytes > self.search.budget or bound.seconds >= to_beat:
            return False
        return task.schedule == PLAIN or self._expected(task) * (1 - _GAIN) < to_beat

    def _expected(self, task: _Task) -> float:
        """Seconds of `task` in FSDP's order; those of its bound where that is not simulated."""
        candidate = self.space.likeliest(task.group)
        if task.room and self.space.tries_budgets:
            if task.group not in self.rooms:
                return task.bound.seconds
            group = replace(self._with_budgets(task.group), budget=self.rooms[task.group])
            candidate = replace(candidate, group=group)
        if candidate.schedule != PLAIN:
            return task.bound.seconds
        tried = [self.search.results.get(other) for other in self._plain(candidate.group)]
        known = [result.seconds for result in tried if result is not None]
        if known or task.bound.seconds >= self.search.to_beat():
            return min(known, default=task.bound.seconds)
        result = self.search.evaluator.result(candidate)
        return task.bound.seconds if result is None else result.seconds

    def _leave_out(self, task: _Task) -> None:
        tried = {result.candidate.group for result in self.search.results.values()}
        if task.group not in tried and not task.room:
            self.search.too_slow.append(task.group)

    def _untried(self, task: _Task) -> Candidate:
        """A candidate that stands for `task`."""
        if not task.room:
            group = task.group
        elif self.space.tries_budgets:
            group = replace(self._with_budgets(task.group), budget=self.search.budget)
        else:
            group = replace(task.group, budget=self.search.budget)
        if task.schedule != PLAIN:
            return Candidate(group, schedule=task.schedule)
        return replace(self.space.likeliest(task.group), group=group)

    def _look_around(self, tasks: list[_Task]) -> None:
        """Try the likeliest candidate of most groups, before time is spent on all of a few."""
        search = self.search
        likely = [task for task in tasks if not task.room and self.space.is_default(task.group)]
        with search.stage("simulate likely candidates", len(likely)):
            for task in likely:
                search.advance()
                if search.limit.passed(search.shares.likely) and search.results:
                    return
                if self._is_promising(task):
                    search.record([search.evaluator.result(self._fastest(task.group))])
                    search.evaluator.collect_garbage()

    # -- trying -----------------------------------------------------------------------------------

    def _try(self, task: _Task) -> None:
        if task.schedule == PLAIN:
            with self.search.simulator.sharing_prefix():
                if task.room:
                    self._find_room(task.group)
                else:
                    self._try_issues(task.group)
        elif task.room:
            self._try_room(task)
        elif not self._room_is_better(task.group):
            candidate = Candidate(task.group, schedule=task.schedule)
            self.search.record([self.search.evaluator.result(candidate)])

    def _room_is_better(self, group: CandidateGroup) -> bool:
        """Whether a budget makes "overlap" of `group`, which recomputes nothing, no worse.

        Only where its step nearly fits in FSDP's order may "overlap" fit without a budget.
        """
        if group.recompute is not None or not self.space.tries_budgets:
            return False
        plain = self.search.evaluator.result(self.space.likeliest(group))
        budget = self.search.budget
        return plain is None or not budget < plain.peak <= _OVERLAP_MAY_FIT * budget

    def _plain(self, group: CandidateGroup) -> list[Candidate]:
        """The candidates of `group` in FSDP's order: "pre" first, smaller distances first."""
        return [c for c in self.space.candidates(group) if c.schedule == PLAIN]

    def _fastest(self, group: CandidateGroup) -> Candidate:
        """The candidate of `group` with the most prefetching, in FSDP's order if allowed."""
        plain = self._plain(group)
        if not plain:
            return self.space.candidates(group)[0]
        return [candidate for candidate in plain if candidate.backward == plain[0].backward][-1]

    def _try_issues(self, group: CandidateGroup) -> None:
        """Try the ways to issue gathers in FSDP's order."""
        search = self.search
        to_beat = search.to_beat()
        fastest = search.evaluator.result(self._fastest(group))
        search.record([fastest])
        if fastest is None or fastest.peak <= search.budget:
            return
        if fastest.seconds >= to_beat * (1 - TOLERANCE):
            return
        plain = self._plain(group)
        last = [c for c in plain if c.backward == plain[-1].backward]
        least = search.evaluator.result(last[0])
        search.record([least])
        if least is not None and least.peak <= _NEARLY_FITS * search.budget:
            search.record(map(search.evaluator.result, plain))

    def _try_close_issues(self) -> None:
        """Try all ways to issue gathers of groups that are nearly as fast as the best.

        Gathers in flight slow compute down, so less prefetching is faster at times.
        """
        search = self.search
        close = [
            result.candidate.group
            for result in search.results.values()
            if result.candidate.schedule == PLAIN
            and result.seconds <= _CLOSE * search.to_beat()
            and result.peak <= _NEARLY_FITS * search.budget
        ]
        for group in dict.fromkeys(close):
            with search.simulator.sharing_prefix():
                for candidate in self._plain(group):
                    if search.over(search.shares.budgets):
                        return
                    search.record([search.evaluator.result(candidate)])

    # -- budgets ----------------------------------------------------------------------------------

    def _with_budgets(self, group: CandidateGroup) -> CandidateGroup:
        return self.space.budgets(Candidate(group)).candidate(0).group

    def _find_room(self, group: CandidateGroup) -> None:
        """Find the budget within which `group` just fits in FSDP's order, which is quick."""
        search = self.search
        records = PLAIN in self.space.schedules
        nothing = replace(group, recompute=None)
        start = None
        if search.bounds[nothing].bytes <= search.budget:
            start = search.evaluator.result(self.space.likeliest(nothing))
        fits = start is not None and start.peak <= search.budget
        if not fits:
            start = search.evaluator.result(self.space.likeliest(group))
        if start is None:
            return
        search.record([start] if records else [])
        self.rooms[group] = search.budget - (start.peak - start.step_bytes)
        if fits:
            return
        issue = replace(start.candidate, group=self._with_budgets(group))
        room = self._fit(issue, self.rooms[group], _TRIES, record=records)
        if room is None:
            return
        self.rooms[group] = room
        best = search.evaluator.result(replace(issue, group=replace(issue.group, budget=room)))
        if records and best is not None and best.seconds <= _CLOSE * search.to_beat():
            for other in self._plain(replace(issue.group, budget=room)):
                if other.backward == issue.backward:
                    search.record([search.evaluator.result(other)])

    def _try_room(self, task: _Task) -> None:
        """Try a schedule within the budget of FSDP's order, then within others around it.

        With fewer bytes "overlap" is faster at times.
        """
        search, group = self.search, task.group
        if self.space.tries_budgets:
            group, room = self._with_budgets(group), self.rooms.get(group)
        else:
            start = search.evaluator.result(self._fastest(group))
            room = None if start is None else search.budget - (start.peak - start.step_bytes)
        if room is None:
            return
        candidate = Candidate(replace(group, budget=room), schedule=task.schedule)
        result = search.evaluator.result(candidate)
        search.record([result])
        if result is None:
            return
        left = search.budget - result.peak
        if not 0 <= left < _LEFT * search.budget and room + left < search.budget:
            self._fit(candidate, room + left, _SLOW_TRIES)

    def _fit(self, issue: Candidate, first: int, tries: int, *, record: bool = True) -> int | None:
        """Try `issue` within budgets from `first` on; return the largest with which it fits."""
        search = self.search

        def left(room: int) -> int | None:
            if search.over(search.shares.budgets):
                return None
            group = replace(issue.group, budget=room)
            result = search.evaluator.result(replace(issue, group=group))
            search.record([result] if record else [])
            return None if result is None else search.budget - result.peak

        return largest_room(left, first, search.budget, tries)

    def _simplify(self) -> None:
        """Try the best policy with more room, without its budget, and without recomputation."""
        search = self.search
        best = search.best(search.results.values())
        if best is None or best.candidate.group.budget is None:
            return
        left = search.budget - best.peak
        more = best.candidate.group.budget + left
        slow = best.candidate.schedule != PLAIN
        if slow and left >= _LEFT * search.budget and more < search.budget:
            self._fit(best.candidate, more, _SLOW_TRIES)
            best = search.best(search.results.values()) or best
        group = best.candidate.group
        nothing = None if self.space.tries_budgets else group.recompute
        for budget in (None, group.budget):
            simpler = replace(group, recompute=nothing, budget=budget)
            result = search.evaluator.result(replace(best.candidate, group=simpler))
            search.record([result])
            if result is not None and search.best([result, best]) is result:
                return
