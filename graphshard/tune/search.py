"""The search: best first, by lower bounds, with every policy simulated as `simulate` does.

README.md says what is tried, and in which order. FSDP's order goes first, since
`schedule="overlap"` takes ten times as long to simulate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from graphshard.errors import PolicyError
from graphshard.format import human_bytes, human_seconds
from graphshard.progress import Progress, Stages
from graphshard.tune.bounds import Bound, Bounds
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import PLAIN, Candidate, CandidateGroup, rounded
from graphshard.tune.tuning import EQUAL, CandidateResult, brief, wrapped

_GAIN = 0.05
"""The share by which "overlap" may be faster than FSDP's order; no bound, see README.md."""


_CLOSE = 1.01
"""Groups this much slower than the best are tried with every way to issue gathers."""


_NEARLY_FITS = 1.02
"""Other ways to issue gathers may fit where a step needs this much of the memory."""


_TRIES = {PLAIN: 12, "overlap": 4}
"""The most simulations in which a budget is adjusted, by schedule."""


_LEFT = 3e-3
"""A budget is adjusted no further if this share of the memory is left."""


_TELL_SECONDS = 5.0
"""The time between two lines of progress while candidates are simulated."""


_TO_FINISH = 3
"""What follows the search, the winner's verification, takes as long as so many simulations."""


class NotFasterError(PolicyError):
    """Policies fit, but no step of them is as fast as was asked for."""


class TimeLimit:
    """A limit of `seconds` from now on, or none."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    def passes_in(self, seconds: float) -> bool:
        """Whether the time is over when so many more seconds have gone by."""
        if self.seconds is None:
            return False
        return time.monotonic() - self._begin + seconds >= self.seconds


@dataclass(frozen=True)
class _Task:
    """One thing to try: the candidates of `group` with one `schedule`.

    room: give the step all bytes there are, as a budget for its schedule or recomputation.
    """

    group: CandidateGroup
    schedule: str
    room: bool
    bound: Bound


@dataclass
class Search:
    """One search for the fastest candidate within `budget` bytes.

    results: by candidate. bounds: of each group; budget_bounds: of those that recompute within a
    budget. too_large, too_slow, impossible: groups that were not simulated, because their bound
    exceeds the budget or the best time, or because the model cannot be sharded so. untried:
    candidates that stand for what there was no time for. cut: whether the time limit ended it.
    faster_than: seconds that a step must beat.
    """

    simulator: Simulator
    budget: int
    limit: TimeLimit = field(default_factory=TimeLimit)
    progress: Stages = field(default_factory=lambda: Progress(visible=False))
    faster_than: float | None = None
    results: dict[Candidate, CandidateResult] = field(default_factory=dict)
    bounds: dict[CandidateGroup, Bound] = field(default_factory=dict)
    budget_bounds: dict[CandidateGroup, Bound] = field(default_factory=dict)
    too_large: list[CandidateGroup] = field(default_factory=list)
    too_slow: list[CandidateGroup] = field(default_factory=list)
    impossible: list[CandidateGroup] = field(default_factory=list)
    untried: list[Candidate] = field(default_factory=list)
    cut: bool = False

    def __post_init__(self) -> None:
        self.space = self.simulator.space
        self._rooms: dict[CandidateGroup, int] = {}
        """The largest budget within which FSDP's order fits, of groups that recompute all."""
        self._simulation_seconds = 0.0
        self._told = time.monotonic()

    def run(self) -> CandidateResult | None:
        """Return the fastest candidate that fits; None if none was found."""
        self.find_bounds()
        tasks = sorted(self._tasks(), key=lambda task: task.bound.seconds)
        quick = [task for task in tasks if task.schedule == PLAIN]
        slow = [task for task in tasks if task.schedule != PLAIN]
        self._try_likely(quick or slow)
        with self.progress.stage("simulate candidates", len(tasks)):
            self._try_all(quick)
            self._try_all(sorted(slow, key=self._expected))
        self._try_close_issues()
        self._simplify()
        winner, limit = self.best(), self.faster_than
        if limit is not None:
            left_out = winner is None and self.too_slow and not self.untried
            if left_out or (winner is not None and winner.seconds >= limit):
                raise NotFasterError(f"no step takes less than {human_seconds(limit)}")
        return winner

    # -- results ----------------------------------------------------------------------------------

    def over(self) -> bool:
        """Whether the time ends with what is left to do, so that something is left out."""
        self.cut |= (over := self.limit.passes_in(_TO_FINISH * self._simulation_seconds))
        return over

    def result(self, candidate: Candidate, *, record: bool = True) -> CandidateResult | None:
        """Simulate `candidate`; keep its result, if `record`, and tell of a new best one."""
        begin, simulated = time.monotonic(), self.simulator.simulated
        result = self.simulator.result(candidate)
        if self.simulator.simulated > simulated and candidate.schedule == PLAIN:
            self._simulation_seconds = time.monotonic() - begin
        if result is not None and record:
            before = self.best()
            self.results[candidate] = result
            self._tell(before)
        return result

    def _tell(self, before: CandidateResult | None) -> None:
        """Tell of a new best one, and from time to time that the search goes on."""
        best, now = self.best(), time.monotonic()
        is_new = best is not None and best != before
        if not isinstance(self.progress, Progress):
            return
        if not is_new and now - self._told < _TELL_SECONDS:
            return
        self._told = now
        text = f"{self.simulator.simulated} simulations, nothing fits so far"
        if best is not None:
            text = f"best so far: {human_seconds(best.seconds)} a step, {human_bytes(best.peak)}"
            text += f", {brief(self.space.policy(best.candidate))}" if is_new else ""
            text += "" if is_new else f", after {self.simulator.simulated} simulations"
        self.progress.tell(wrapped(text, 4, 100))

    def best(self, results: Iterable[CandidateResult] | None = None) -> CandidateResult | None:
        """Return the fastest of `results` that fits; the simplest of those that are as fast."""
        results = self.results.values() if results is None else results
        fitting = [result for result in results if result.peak <= self.budget]
        if not fitting:
            return None
        fastest = min(result.seconds for result in fitting)
        equal = [result for result in fitting if result.seconds <= fastest * (1 + EQUAL)]
        return min(equal, key=lambda one: (self.space.complexity(one.candidate), one.peak))

    def to_beat(self) -> float:
        """The seconds below which a candidate is better than the best so far and `faster_than`."""
        fitting = (one.seconds for one in self.results.values() if one.peak <= self.budget)
        limit = inf if self.faster_than is None else self.faster_than
        return min(limit, min(fitting, default=inf) * (1 - EQUAL))

    # -- what to try ------------------------------------------------------------------------------

    def find_bounds(self) -> None:
        """Fill `bounds`, for as many groups as there is time for."""
        bounds, groups = Bounds(self.simulator), self.space.groups()
        with self.progress.stage("bounds", len(groups)):
            for group in groups:
                if self.bounds and self.over():
                    self.untried.append(self.space.likeliest(group))
                else:
                    self.bounds[group] = bounds.of(group)
                self.progress.advance()

    def _tasks(self) -> Iterator[_Task]:
        slow = self.space.schedules[-1]
        for group, bound in self.bounds.items():
            if not bound.possible:
                self.impossible.append(group)
                continue
            if bound.bytes <= self.budget:
                if PLAIN in self.space.schedules:
                    yield _Task(group, PLAIN, False, bound.of_schedule(PLAIN))
                if slow != PLAIN and self.space.is_default(group):
                    room = not self.space.tries_budgets
                    yield _Task(group, slow, room, bound.of_schedule(slow))
            else:
                self.too_large.append(group)
            if self.space.tries_budgets and self._may_have_budgets(group):
                # Whatever is recomputed, a step takes no less than with nothing recomputed.
                least = replace(self.bounds[replace(group, recompute=None)], bytes=0)
                self.budget_bounds[group] = least
                for schedule in self.space.schedules:
                    yield _Task(group, schedule, True, least.of_schedule(schedule))

    def _may_have_budgets(self, group: CandidateGroup) -> bool:
        """Whether `group` recomputes all, so that budgets between that and nothing are tried."""
        if group.recompute != self.space.recompute_all:
            return False
        if replace(group, recompute=None) not in self.bounds:
            return False  # there was no time for its bound
        if self.space.schedules[-1] != PLAIN and not self.space.is_default(group):
            return False
        return group.offload is None or "activations" not in group.offload

    def _is_promising(self, task: _Task) -> bool:
        bound = task.bound
        if bound.bytes > self.budget or bound.seconds >= self.to_beat():
            return False
        return task.schedule == PLAIN or self._expected(task) * (1 - _GAIN) < self.to_beat()

    def _expected(self, task: _Task) -> float:
        """Seconds of `task` in FSDP's order; those of its bound where that is not simulated."""
        group = task.group
        if task.room and self.space.tries_budgets:
            if group not in self._rooms:
                return task.bound.seconds
            group = replace(self.space.with_budgets(group), budget=self._rooms[group])
        tried = [self.results.get(other) for other in self.space.plain(group)]
        return min((o.seconds for o in tried if o is not None), default=task.bound.seconds)

    def _untried(self, task: _Task) -> Candidate:
        group = task.group
        if task.room:
            group = self.space.with_budgets(group) if self.space.tries_budgets else group
            group = replace(group, budget=self.budget)
        if task.schedule != PLAIN:
            return Candidate(group, schedule=task.schedule)
        return replace(self.space.likeliest(task.group), group=group)

    # -- trying -----------------------------------------------------------------------------------

    def _try_likely(self, tasks: list[_Task]) -> None:
        """Try the likeliest candidate of most groups, before time is spent on all of a few."""
        likely = [task for task in tasks if not task.room and self.space.is_default(task.group)]
        with self.progress.stage("simulate likely candidates", len(likely)):
            for task in likely:
                if self.results and self.over():
                    return
                if self._is_promising(task):
                    self.result(self.space.fastest(task.group))
                self.progress.advance()

    def _try_all(self, tasks: list[_Task]) -> None:
        for task in tasks:
            if not self._is_promising(task):
                if not task.room and not any(c.group == task.group for c in self.results):
                    self.too_slow.append(task.group)
            elif self.results and self.over():
                self.untried.append(self._untried(task))
            else:
                self._try(task)
            self.progress.advance()

    def _try(self, task: _Task) -> None:
        if task.schedule != PLAIN and task.room:
            self._try_room(task)
        elif task.schedule != PLAIN:
            self.result(Candidate(task.group, schedule=task.schedule))
        elif task.room:
            self._find_room(task.group)
        else:
            self._try_issues(task.group)

    def _try_issues(self, group: CandidateGroup) -> None:
        to_beat = self.to_beat()
        fastest = self.result(self.space.fastest(group))
        if fastest is None or fastest.peak <= self.budget or fastest.seconds >= to_beat:
            return
        plain = self.space.plain(group)
        least = self.result(next(c for c in plain if c.backward == plain[-1].backward))
        if least is not None and least.peak <= _NEARLY_FITS * self.budget:
            self._while_there_is_time(plain)

    def _while_there_is_time(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if self.over():
                return
            self.result(candidate)

    def _try_close_issues(self) -> None:
        """Try all ways to issue gathers of groups that are nearly as fast as the best.

        Gathers in flight slow compute down, so less prefetching is faster at times.
        """
        close = [
            result.candidate.group
            for result in self.results.values()
            if result.candidate.schedule == PLAIN
            and result.seconds <= _CLOSE * self.to_beat()
            and result.peak <= _NEARLY_FITS * self.budget
        ]
        for group in dict.fromkeys(close):
            self._while_there_is_time(self.space.plain(group))

    # -- budgets ----------------------------------------------------------------------------------

    def _find_room(self, group: CandidateGroup) -> None:
        """Find the budget within which `group` just fits in FSDP's order, which is quick."""
        records = PLAIN in self.space.schedules
        nothing = replace(group, recompute=None)
        start = None
        if self.bounds[nothing].bytes <= self.budget:
            start = self.result(self.space.likeliest(nothing), record=records)
        fits = start is not None and start.peak <= self.budget
        if not fits:
            start = self.result(self.space.likeliest(group), record=records)
        if start is None:
            return
        self._rooms[group] = self.budget - (start.peak - start.step_bytes)
        if fits:
            return
        issue = replace(start.candidate, group=self.space.with_budgets(group))
        room = self._fit(issue, self._rooms[group], record=records)
        if room is None:
            return
        self._rooms[group] = room
        found = replace(issue.group, budget=room)
        best = self.result(replace(issue, group=found), record=records)
        if records and best is not None and best.seconds <= _CLOSE * self.to_beat():
            same = [c for c in self.space.plain(found) if c.backward == issue.backward]
            self._while_there_is_time(same)

    def _try_room(self, task: _Task) -> None:
        """Try a schedule within the budget of FSDP's order, then within others around it.

        With fewer bytes "overlap" is faster at times.
        """
        group = task.group
        if self.space.tries_budgets:
            group, room = self.space.with_budgets(group), self._rooms.get(group)
        else:
            start = self.result(self.space.fastest(group), record=False)
            room = None if start is None else self.budget - (start.peak - start.step_bytes)
        if room is None:
            return
        candidate = Candidate(replace(group, budget=room), schedule=task.schedule)
        result = self.result(candidate)
        if result is None:
            return
        left = self.budget - result.peak
        if not 0 <= left < _LEFT * self.budget and room + left < self.budget:
            self._fit(candidate, room + left)

    def _fit(self, issue: Candidate, first: int, *, record: bool = True) -> int | None:
        """Try `issue` within budgets from `first` on; return the largest with which it fits."""

        def left(room: int) -> int | None:
            if self.over():
                return None
            group = replace(issue.group, budget=room)
            result = self.result(replace(issue, group=group), record=record)
            return None if result is None else self.budget - result.peak

        return largest_room(left, first, self.budget, _TRIES[issue.schedule])

    def _simplify(self) -> None:
        """Try the best policy without its budget: it may have chosen to recompute nothing."""
        best = self.best()
        if best is None or best.candidate.group.budget is None:
            return
        group = replace(best.candidate.group, budget=None)
        if self.space.tries_budgets:
            group = replace(group, recompute=None)
        self._while_there_is_time([replace(best.candidate, group=group)])


def largest_room(
    left: Callable[[int], int | None], first: int, memory: int, tries: int
) -> int | None:
    """Return the largest budget found that fits, up to `memory`; None if none was found.

    Args:
        left: the bytes of memory that a step within this budget leaves: negative if it needs more
            than there is. None if no step keeps within the budget, which is then too small.
        first: the budget to try first.
        memory: bytes; a step within as large a budget does not leave any.
        tries: the most calls of `left`.
    """
    too_small, too_large = 0, memory + 1
    fits = None
    room = first
    for attempt in range(tries):
        if not too_small < room < too_large:
            room = (too_small + too_large) // 2
        room = rounded(room)
        if room <= too_small or too_large - too_small <= min(1 << 20, memory >> 10):
            break
        rest = left(room)
        if rest is not None and rest < 0:
            too_large = room
        else:
            too_small = room
            fits = fits if rest is None else room
        room = room + rest if rest and attempt < 2 else (too_small + too_large) // 2
    return fits
