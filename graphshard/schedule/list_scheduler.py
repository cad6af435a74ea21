"""The list scheduler: one walk over the compute of a step that emits all other nodes around it.

The compute stream has a fixed order, and each communicator is a queue. At each place of the frame
the walk ends reduces that are done, launches reduces that are ready, and issues gathers whose
latest start has come. The bytes of early gathers and late waits are reserved in a table by place,
never above the budget. See README.md for the rules and their source.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor, fx

from graphshard.cost.streams import Clocks, stream_of
from graphshard.program import ops
from graphshard.schedule.jobs import Job, JobTable

MINIMAL = "minimal"


CHAIN, OWN, NONE = "chain", "own", "none"


@dataclass(frozen=True)
class Rule:
    """The decisions of a walk.

    guard: which gathers are issued before a reduce that is ready. "chain": gathers that would start
        after their latest start behind the reduce; "own": gathers that would end late because of
        this reduce alone; "none": no gathers. "minimal" places every job where it holds the fewest
        bytes, which hides no communication.
    count_reduces: whether latest starts leave time for reduces.
    """

    guard: str = CHAIN
    count_reduces: bool = True


@dataclass
class PlacedOrder:
    """An order of all nodes, with the seconds and the maximum bytes that the walk found for it."""

    order: list[fx.Node]
    seconds: float
    bytes: int


@dataclass
class ByteTable:
    """Bytes by place of the frame, as int64 tensors of shape `(places,)`.

    least: the bytes held if each job holds the fewest. most: the bytes allowed.
    """

    least: Tensor
    most: Tensor


def place(table: JobTable, rule: Rule, limits: ByteTable | None = None) -> PlacedOrder:
    """Place all nodes by `rule`; without `limits`, bytes are not limited."""
    return _Walk(table, rule, limits).run()


@dataclass
class _Flight:
    """A reduce that was launched and is not waited for yet."""

    job: Job
    done: float  # when it ends, on the communicator's clock
    until: int  # the latest place of its wait
    reserved: int = 0  # its bytes are reserved up to this place


@dataclass
class _Walk:
    table: JobTable
    rule: Rule
    limits: ByteTable | None
    order: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = self.table
        self.minimal = self.rule.guard == MINIMAL
        self.ideal = [0.0]  # by place, when compute reaches it if it never waits
        for seconds in table.seconds:
            self.ideal.append(self.ideal[-1] + seconds)
        self.clocks = Clocks(table.hardware)
        self.live = None if self.limits is None else self.limits.least.clone()
        self.gathers = deque(job for job in table.jobs if job.is_gather)
        self.reduces = {
            queue: deque(job for job in table.jobs if job.queue == queue)
            for queue in ("reduce", "average")
        }
        self.due: dict[Job, int] = {}  # by gather, where it or a later one is first needed
        first = len(table.frame)
        for job in reversed(self.gathers):
            first = self.due[job] = min(first, job.need)
        self.latest = self._latest_starts()
        self.host_gathers = deque(job for job in self.gathers if job.from_host)
        self.copy_ends: dict[fx.Node, float] = {}  # by copy between device and host
        self.gather_ends: dict[Job, float] = {}  # by gather that is under way
        self.flights: list[_Flight] = []
        self.ended: set[Job] = set()
        self.late_arrivals: list[fx.Node] = []  # of copies that no node reads
        self.reads = dict(table.reads)

    # -- before the walk --------------------------------------------------------------------------

    def _latest_starts(self) -> dict[Job, float]:
        """By gather, the latest ideal time to start it so that compute does not wait.

        The byte budget is not considered.
        """
        ideal = self.ideal
        deadlines: list[tuple[float, int, Job]] = []
        for number, job in enumerate(self.table.jobs):
            if job.is_gather:
                deadlines.append((ideal[job.need] - job.seconds, number, job))
            elif self.rule.count_reduces and not job.after:
                deadlines.append((ideal[job.ready], number, job))
        latest: dict[Job, float] = {}
        free_until: dict[str, float] = {}
        for _, _, job in sorted(deadlines, key=lambda item: item[:2], reverse=True):
            until = free_until.get(job.stream, float("inf"))
            if job.is_gather:
                until = min(ideal[job.need], until)
            free_until[job.stream] = until - job.seconds
            if job.is_gather:
                latest[job] = until - job.seconds
        earliest = float("inf")  # gathers keep their order
        for job in reversed(self.gathers):
            earliest = latest[job] = min(latest[job], earliest)
        return latest

    # -- the walk ---------------------------------------------------------------------------------

    def run(self) -> PlacedOrder:
        table = self.table
        self.order += table.head
        for index, node in enumerate(table.frame):
            if index == table.border:
                self._cross()
            self._end_reduces(index)
            self._issue(index)
            if self.gather_ends:
                for job in [job for job in self.gather_ends if job.need == index]:
                    self._end_gather(job)
            self._emit(node)
        end = len(table.frame)
        if end == table.border:
            self._cross()
        self._issue(end)
        while self.flights:
            self._end(self.flights[0], end)
        for arrival in self.late_arrivals:
            self._emit(arrival)
        self.order.append(table.tail)
        most = 0 if self.live is None or not self.live.numel() else int(self.live.max())
        return PlacedOrder(self.order, self.clocks.end, most)

    def _cross(self) -> None:
        """End the gathers of forward for backward, since only ended ones may be saved."""
        while self.gathers and self.gathers[0].need == self.table.border:
            self._gather(self.gathers[0], self.table.border)
        for job in [job for job in self.gather_ends if job.need == self.table.border]:
            self._end_gather(job)

    def _emit(self, node: fx.Node) -> None:
        """Append `node` to the order, advance the clocks, and emit the frees that it allows."""
        self.order.append(node)
        if node.target in ops.COPIES:
            stream = stream_of(node)
            seconds, load, _ = self.table.cost[node]
            self.copy_ends[node] = self.clocks.launch(stream, seconds, load=load, copy=True)
        elif node.target is ops.arrive:
            self.clocks.wait(self.copy_ends[node.all_input_nodes[0]])
        else:
            seconds, _, moves = self.table.cost[node]
            self.clocks.compute(seconds, only_moves=moves)
        for free in self.table.frees.get(node, ()):
            self.reads[free] -= 1
            if not self.reads[free]:
                self._emit(free)

    def _end_reduces(self, index: int) -> None:
        """End the reduces that are done or whose bytes may not be held any longer."""
        for flight in list(self.flights):
            if self.clocks.now >= flight.done or flight.until <= index or self.minimal:
                self._end(flight, index)

    def _issue(self, index: int) -> None:
        """Issue the gathers that are due, and launch the reduces that are ready."""
        while True:
            reduce = self._next_reduce(index)
            gather = self._next_gather(index, reduce)
            if gather is not None:
                self._gather(gather, index)
            elif reduce is not None:
                self._reduce(reduce, index)
            else:
                return

    def _next_reduce(self, index: int) -> Job | None:
        """A reduce that is ready; None if there is none."""
        for queue in self.reduces.values():
            if queue and queue[0].ready <= index and self._follows(queue[0], index):
                return queue[0]
        return None

    def _follows(self, job: Job, index: int) -> bool:
        """Whether the phase of `job` has begun and the jobs it depends on have ended."""
        return job.earliest <= index and job.after <= self.ended

    # -- gathers ----------------------------------------------------------------------------------

    def _next_gather(self, index: int, reduce: Job | None) -> Job | None:
        """The next gather if it must be issued at this place; None otherwise."""
        if not self.gathers:
            return None
        job = self.gathers[0]
        if not (job.ready <= index and self._follows(job, index)):
            return None
        if index >= self.due[job]:
            return job
        if self.minimal:
            return None
        # Few gathers are due, and checking the bytes takes longest.
        due = self._is_due(job, index) or self._goes_before(job, reduce, index)
        return job if due and self._fits(job, index) else None

    def _is_due(self, job: Job, index: int) -> bool:
        """Whether a gather would start late if it were issued at the next place."""
        if self.ideal[index + 1] <= self.latest[job]:
            return False
        waits = [done for other, done in self.gather_ends.items() if other.need == index]
        reached = max([self.clocks.now, *waits]) + self.table.seconds[index]  # the next place
        return self.clocks.ends.get(job.stream, 0.0) < reached

    def _goes_before(self, job: Job, reduce: Job | None, index: int) -> bool:
        """Whether a gather would be late if `reduce`, which is ready, were issued before it."""
        if reduce is None or reduce.stream != job.stream or self.rule.guard == NONE:
            return False
        behind = self.clocks.now - self.ideal[index]
        free_at = max(self.clocks.now, self.clocks.ends.get(job.stream, 0.0)) + reduce.seconds
        limit = self.latest[job]
        if self.rule.guard == OWN:
            limit = self.ideal[job.need] - job.seconds
        return free_at > limit + behind

    def _fits(self, job: Job, index: int) -> bool:
        """Whether the bytes of a gather issued at `index` stay in the limits."""
        if self.live is None or self.limits is None:
            return True
        places = slice(index, job.need)
        return bool((self.live[places] + job.extra_bytes <= self.limits.most[places]).all())

    def _gather(self, job: Job, index: int) -> None:
        self.gathers.popleft()
        if self.live is not None:
            self.live[index : job.need] += job.extra_bytes
        # Issue the copies of its shards from the host, and those of the next gather ahead.
        for ahead in list(self.host_gathers)[:2]:
            if ahead.earliest <= index:
                self.host_gathers.remove(ahead)
                for node in ahead.from_host:
                    self._emit(node)
        for node in job.issue[:-1]:
            self._emit(node)
        self.order.append(job.collective)
        load = self.table.cost[job.collective].load
        self.gather_ends[job] = self.clocks.launch(job.stream, job.seconds, load=load)

    def _end_gather(self, job: Job) -> None:
        self.clocks.wait(self.gather_ends.pop(job))
        self._finish(job)

    def _finish(self, job: Job) -> None:
        """Emit the wait of a job and the nodes after it."""
        if job.to_host:
            arrivals, self.late_arrivals = self.late_arrivals, []
            for arrival in arrivals:
                self._emit(arrival)
        for node in job.wait:
            self._emit(node)
        self.late_arrivals += job.arrivals
        self.ended.add(job)

    # -- reduces ----------------------------------------------------------------------------------

    def _reduce(self, job: Job, index: int) -> None:
        self.reduces[job.queue].popleft()
        for node in job.issue[:-1]:
            self._emit(node)
        self.clocks.compute(job.local, only_moves=True)
        self.order.append(job.collective)
        load = self.table.cost[job.collective].load
        done = self.clocks.launch(job.stream, job.seconds, load=load)
        flight = _Flight(job, done, job.need)
        self.flights.append(flight)
        if self.minimal:
            self._end(flight, index)
            return
        if self.live is None or self.limits is None:
            return
        until = min(
            job.need, bisect_left(self.ideal, done - self.clocks.now + self.ideal[index], index)
        )
        while self._first_over(job, index, until) == index and len(self.flights) > 1:
            self._end(self.flights[0], index)  # launched earlier, so done earlier
        if flight not in self.flights:
            return  # it was ended for a follower of another flight
        until = flight.until = self._first_over(job, index, until)
        self.live[index:until] += job.extra_bytes
        flight.reserved = until
        if until == index < len(self.table.frame):
            self._end(flight, index)

    def _first_over(self, job: Job, index: int, until: int) -> int:
        """The first place at which the bytes of `job` exceed the limits; `until` if none."""
        assert self.live is not None
        assert self.limits is not None
        over = self.live[index:until] + job.extra_bytes > self.limits.most[index:until]
        return index + int(over.int().argmax()) if over.any() else until

    def _end(self, flight: _Flight, index: int) -> None:
        """Wait for a reduce unless a follower did, and launch the reduces that read its results."""
        if flight not in self.flights:
            return
        self.flights.remove(flight)
        if self.live is not None and flight.reserved > index:
            self.live[index : flight.reserved] -= flight.job.extra_bytes
        self.clocks.wait(flight.done)
        self._finish(flight.job)
        for follower in flight.job.followers:
            queue = self.reduces[follower.queue]
            while queue and queue[0].ready <= index and self._follows(queue[0], index):
                self._reduce(queue[0], index)
                if follower in self.ended:
                    break
