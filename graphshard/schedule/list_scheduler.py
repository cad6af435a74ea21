"""The list scheduler: one walk over the compute of a step that emits all other nodes around it.

Machines are the compute stream, whose order is fixed, and one per communicator, first in first out.

At each place of the frame the walk knows both clocks. It ends the reduces that are done, launches
those whose operands are there, and issues each gather where its latest start has come: latest
starts are found backwards from the deadlines (where the results are read), the reduces in between
being counted as work that must fit too (literature: README.md of this folder). A gather that would
not start later for it is issued later. What a gather takes earlier, or a reduce holds longer, than
it must is reserved in a table of bytes by place, never above the budget: where the ideal place
breaks that, the next place that keeps it is taken; a reduce that may not be held until it is done
is waited for where its bytes are needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor, fx

from graphshard.cost.clocks import Clocks
from graphshard.cost.streams import stream_of
from graphshard.program import ops
from graphshard.schedule.jobs import Job, Tasks

MINIMAL = "minimal"


CHAIN, OWN, NONE = "chain", "own", "none"


@dataclass(frozen=True)
class Rule:
    """How a walk decides.

    guard: which gathers go before a reduce that is ready: "chain", those that it would make start
        later than their latest start; "own", those that it alone would make late; "none". "minimal"
        puts everything where it holds the fewest bytes, which hides nothing.
    count_reduces: whether latest starts leave time for reduces.
    """

    guard: str = CHAIN
    count_reduces: bool = True


@dataclass
class Placed:
    """All nodes of a program in an order, the seconds it takes and the most bytes, by the walk."""

    order: list[fx.Node]
    seconds: float
    bytes: int


@dataclass
class Bytes:
    """By place of the frame, the bytes held by everything at its least, and the most allowed."""

    least: Tensor  # int64, as is most
    most: Tensor


def place(tasks: Tasks, rule: Rule, held: Bytes | None = None) -> Placed:
    """An order of all nodes by `rule`; without `held` the bytes are not looked at."""
    return _Walk(tasks, rule, held).run()


@dataclass
class _Flight:
    job: Job
    done: float  # when, on the communicator's clock
    until: int  # the place at which it is waited for at the latest
    reserved: int = 0


@dataclass
class _Walk:
    tasks: Tasks
    rule: Rule
    held: Bytes | None
    order: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        tasks = self.tasks
        self.minimal = self.rule.guard == MINIMAL
        self.ideal = [0.0]  # when compute reaches each place if it never waits
        for seconds in tasks.seconds:
            self.ideal.append(self.ideal[-1] + seconds)
        self.clocks = Clocks(tasks.contention)
        self.live = None if self.held is None else self.held.least.clone()
        self.gathers = deque(job for job in tasks.jobs if job.is_gather)
        self.reduces = {
            queue: deque(job for job in tasks.jobs if job.queue == queue)
            for queue in ("reduce", "average")
        }
        self.due: dict[Job, int] = {}  # by gather, where it or one behind it is needed first
        first = len(tasks.frame)
        for job in reversed(self.gathers):
            first = self.due[job] = min(first, job.need)
        self.latest = self._latest_starts()
        self.fetches = deque(job for job in self.gathers if job.fetch)
        self.copied: dict[fx.Node, float] = {}  # when copies between device and host are there
        self.gathered: dict[Job, float] = {}  # gathers under way: when they are done
        self.flights: list[_Flight] = []
        self.ended: set[Job] = set()
        self.late: list[fx.Node] = []  # arrivals that may wait
        self.reads = dict(tasks.reads)

    # -- before the walk --------------------------------------------------------------------------

    def _latest_starts(self) -> dict[Job, float]:
        """By gather, the ideal time at which it must start for no compute to wait, were there bytes
        for all of them.
        """
        ideal = self.ideal
        work: list[tuple[float, int, Job]] = []
        for number, job in enumerate(self.tasks.jobs):
            if job.is_gather:
                work.append((ideal[job.need] - job.seconds, number, job))
            elif self.rule.count_reduces and not job.after:
                work.append((ideal[job.ready], number, job))
        found: dict[Job, float] = {}
        free_until: dict[str, float] = {}
        for _, _, job in sorted(work, key=lambda item: item[:2], reverse=True):
            until = free_until.get(job.stream, float("inf"))
            if job.is_gather:
                until = min(ideal[job.need], until)
            free_until[job.stream] = until - job.seconds
            if job.is_gather:
                found[job] = until - job.seconds
        earliest = float("inf")  # none overtakes another
        for job in reversed(self.gathers):
            earliest = found[job] = min(found[job], earliest)
        return found

    # -- the walk ---------------------------------------------------------------------------------

    def run(self) -> Placed:
        tasks = self.tasks
        self.order += tasks.head
        for index, node in enumerate(tasks.frame):
            if index == tasks.border:
                self._cross()
            self._settle(index)
            self._issue(index)
            if self.gathered:
                for job in [job for job in self.gathered if job.need == index]:
                    self._end_gather(job)
            self._emit(node)
        end = len(tasks.frame)
        if end == tasks.border:
            self._cross()
        self._issue(end)
        while self.flights:
            self._end(self.flights[0], end)
        for arrival in self.late:
            self._emit(arrival)
        self.order.append(tasks.tail)
        most = 0 if self.live is None else _most(self.live)
        return Placed(self.order, self.clocks.end, most)

    def _cross(self) -> None:
        """End what forward gathers for backward: what is under way cannot be kept."""
        while self.gathers and self.gathers[0].need == self.tasks.border:
            self._gather(self.gathers[0], self.tasks.border)
        for job in [job for job in self.gathered if job.need == self.tasks.border]:
            self._end_gather(job)

    def _emit(self, node: fx.Node) -> None:
        self.order.append(node)
        if node.target in ops.COPIES:
            stream = stream_of(node)
            self.copied[node] = self.clocks.launch(stream, self.tasks.cost[node])
        elif node.target is ops.arrive:
            self.clocks.wait(self.copied[node.all_input_nodes[0]])
        else:
            self.clocks.compute(self.tasks.cost[node])
        for free in self.tasks.frees.get(node, ()):
            self.reads[free] -= 1
            if not self.reads[free]:
                self._emit(free)

    def _settle(self, index: int) -> None:
        """End the reduces that are done, or may be held no longer."""
        for flight in list(self.flights):
            if self.clocks.now >= flight.done or flight.until <= index or self.minimal:
                self._end(flight, index)

    def _issue(self, index: int) -> None:
        """Issue gathers whose time has come, launch reduces that are ready."""
        while True:
            reduce = self._ready(index)
            gather = self._wanted(index, reduce)
            if gather is not None:
                self._gather(gather, index)
            elif reduce is not None:
                self._reduce(reduce, index)
            else:
                return

    def _ready(self, index: int) -> Job | None:
        for queue in self.reduces.values():
            if queue and queue[0].ready <= index and self._follows(queue[0], index):
                return queue[0]
        return None

    def _follows(self, job: Job, index: int) -> bool:
        """Whether the phase of `job` has begun, and what it reads of another job is there."""
        return job.earliest <= index and job.after <= self.ended

    # -- gathers ----------------------------------------------------------------------------------

    def _wanted(self, index: int, reduce: Job | None) -> Job | None:
        """The next gather, if it is to be issued at this place."""
        if not self.gathers:
            return None
        job = self.gathers[0]
        if not (job.ready <= index and self._follows(job, index)):
            return None
        if index >= self.due[job]:
            return job
        if self.minimal:
            return None
        # In this order, as few gathers are due and looking at bytes takes longest.
        due = self._is_due(job, index) or self._goes_before(job, reduce, index)
        return job if due and self._fits(job, index) else None

    def _is_due(self, job: Job, index: int) -> bool:
        """Whether a gather would start late if it were issued at the next place."""
        if self.ideal[index + 1] <= self.latest[job]:
            return False
        waits = [done for other, done in self.gathered.items() if other.need == index]
        reached = max([self.clocks.now, *waits]) + self.tasks.seconds[index]  # the next place
        return self.clocks.ends.get(job.stream, 0.0) < reached

    def _goes_before(self, job: Job, reduce: Job | None, index: int) -> bool:
        """Whether a gather would be late if `reduce`, which is ready, went before it."""
        if reduce is None or reduce.stream != job.stream or self.rule.guard == NONE:
            return False
        behind = self.clocks.now - self.ideal[index]
        free_at = max(self.clocks.now, self.clocks.ends.get(job.stream, 0.0)) + reduce.seconds
        limit = self.latest[job]
        if self.rule.guard == OWN:
            limit = self.ideal[job.need] - job.seconds
        return free_at > limit + behind

    def _fits(self, job: Job, index: int) -> bool:
        if self.live is None or self.held is None:
            return True
        places = slice(index, job.need)
        return bool((self.live[places] + job.held <= self.held.most[places]).all())

    def _gather(self, job: Job, index: int) -> None:
        self.gathers.popleft()
        if self.live is not None:
            self.live[index : job.need] += job.held
        # Its shards come from the host at the latest now, those of the next one are on their way.
        for ahead in list(self.fetches)[:2]:
            if ahead.earliest <= index:
                self.fetches.remove(ahead)
                for node in ahead.fetch:
                    self._emit(node)
        for node in job.issue[:-1]:
            self._emit(node)
        self.order.append(job.collective)
        self.gathered[job] = self.clocks.launch(job.stream, job.seconds)

    def _end_gather(self, job: Job) -> None:
        self.clocks.wait(self.gathered.pop(job))
        self._finish(job)

    def _finish(self, job: Job) -> None:
        if job.sent:
            late, self.late = self.late, []
            for arrival in late:
                self._emit(arrival)
        for node in job.wait:
            self._emit(node)
        self.late += job.arrivals
        self.ended.add(job)

    # -- reduces ----------------------------------------------------------------------------------

    def _reduce(self, job: Job, index: int) -> None:
        self.reduces[job.queue].popleft()
        for node in job.issue[:-1]:
            self._emit(node)
        self.clocks.compute(job.local)
        self.order.append(job.collective)
        done = self.clocks.launch(job.stream, job.seconds)
        flight = _Flight(job, done, job.need)
        self.flights.append(flight)
        if self.minimal:
            self._end(flight, index)
            return
        if self.live is None or self.held is None:
            return
        until = min(
            job.need, bisect_left(self.ideal, done - self.clocks.now + self.ideal[index], index)
        )
        while self._over(job, index, until) == index and len(self.flights) > 1:
            self._end(self.flights[0], index)  # launched earlier, so done earlier
        if flight not in self.flights:
            return  # ended for a follower of one of those
        until = flight.until = self._over(job, index, until)
        self.live[index:until] += job.held
        flight.reserved = until
        if until == index < len(self.tasks.frame):
            self._end(flight, index)

    def _over(self, job: Job, index: int, until: int) -> int:
        """The first place at which the bytes of `job` break the budget, else `until`."""
        assert self.live is not None
        assert self.held is not None
        over = self.live[index:until] + job.held > self.held.most[index:until]
        return index + int(over.int().argmax()) if over.any() else until

    def _end(self, flight: _Flight, index: int) -> None:
        """Wait for a reduce if none of its followers did, and launch what reads its results."""
        if flight not in self.flights:
            return
        self.flights.remove(flight)
        if self.live is not None and flight.reserved > index:
            self.live[index : flight.reserved] -= flight.job.held
        self.clocks.wait(flight.done)
        self._finish(flight.job)
        for follower in flight.job.followers:
            queue = self.reduces[follower.queue]
            while queue and queue[0].ready <= index and self._follows(queue[0], index):
                self._reduce(queue[0], index)
                if follower in self.ended:
                    break


def _most(held: Tensor) -> int:
    return int(held.max()) if held.numel() else 0
