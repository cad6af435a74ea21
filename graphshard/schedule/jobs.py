"""A finished program as a table: the nodes that stay in order, and the jobs that may move.

What stays (the frame) is compute and whatever else has its place among it: copies of activations,
parts kept by `reshard`, gradients kept for later. A job is a collective with the transfers into it,
its wait with what follows that, and the bytes that an earlier launch or a later wait holds on to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphshard.cost.streams import local_seconds, stream_of
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_after, transfers_into, unpacks, uses_of
from graphshard.program.annotations import Budget
from graphshard.program.collective import wait_of
from graphshard.program.program import BACKWARD, Program


@dataclass(eq=False)
class Job:
    """One collective: what is issued with it, what stands where it is waited for.

    Places are positions in the frame: `ready`, before which its operands are computed; `need`,
    before which its result is read first, or that ends its phase; `earliest`, where its phase
    begins. `held` are the bytes it takes over what it must: of a gather what it allocates, of a
    reduce what is given back at its wait.
    """

    collective: fx.Node
    issue: list[fx.Node]
    wait: list[fx.Node]
    stream: str
    seconds: float
    ready: int
    need: int
    earliest: int
    fetch: list[fx.Node] = field(default_factory=list)  # copies to the device of its shards
    sent: list[fx.Node] = field(default_factory=list)  # copies to the host of what it returns
    arrivals: list[fx.Node] = field(default_factory=list)  # of those
    after: set[Job] = field(default_factory=set)  # whose results it reads
    followers: list[Job] = field(default_factory=list)  # that read its results
    held: int = 0
    local: float = 0.0  # seconds of compute that launching it takes

    @property
    def is_gather(self) -> bool:
        """Whether it is an all_gather."""
        return self.collective.target is ops.all_gather

    @property
    def queue(self) -> str:
        """The jobs among which its place in the order is fixed."""
        if self.is_gather:
            return "gather"
        return "average" if ops.group_of(self.collective) == ops.REPLICATE else "reduce"


@dataclass
class Tasks:
    """The table of a program.

    frame: the nodes that stay in order. seconds: by frame node, of the compute stream.
    jobs: in the program's order. reads: by free, how many nodes must stand before it.
    frees: by node, the frees that wait for it. border: the first frame place of backward.
    head, tail: the placeholders, and the output.
    """

    frame: list[fx.Node]
    seconds: list[float]
    jobs: list[Job]
    reads: dict[fx.Node, int]
    frees: dict[fx.Node, list[fx.Node]]
    border: int
    head: list[fx.Node]
    tail: fx.Node
    cost: Mapping[fx.Node, float]  # seconds of every node on its stream
    contention: float  # the part of compute's speed that communication under way takes

    @classmethod
    def of(
        cls,
        program: Program,
        plan: ShardingPlan,
        budget: Budget,
        cost: Mapping[fx.Node, float],
    ) -> Tasks:
        """The table of `program`, timed on the hardware of `budget`; `cost`: seconds by node."""
        return _Maker(program, plan, budget, cost).tasks()

    def with_early_frees(self, order: Iterable[fx.Node]) -> list[fx.Node]:
        """`order` with each free right behind the last use of what it frees."""
        reads = dict(self.reads)
        found: list[fx.Node] = []
        for node in order:
            if node not in reads:
                found.append(node)
            for free in self.frees.get(node, ()):
                reads[free] -= 1
                if not reads[free]:
                    found.append(free)
        return found


class _Maker:
    def __init__(
        self, program: Program, plan: ShardingPlan, budget: Budget, cost: Mapping[fx.Node, float]
    ) -> None:
        self.program, self.hardware, self.cost = program, budget.hardware, cost
        nodes = list(program.graph.nodes)
        self.place = {node: index for index, node in enumerate(nodes)}
        self.nodes = nodes
        self.job_of: dict[fx.Node, Job] = {}  # of every node of a job

    def tasks(self) -> Tasks:
        collectives = [node for node in self.nodes if ops.is_collective(node)]
        jobs = [self._claim(node) for node in collectives]
        for job in jobs:
            self._claim_wait(job)
        frees = [node for node in self.nodes if node.target is ops.free]
        freed = set(frees)
        frame = [
            node
            for node in self.nodes
            if node.op == "call_function" and node not in self.job_of and node not in freed
        ]
        at = {node: index for index, node in enumerate(frame)}
        is_backward = [node.meta["phase"] == BACKWARD for node in frame]
        border = is_backward.index(True) if True in is_backward else len(frame)
        for job in jobs:
            self._bound(job, at, border, len(frame))
        reads: dict[fx.Node, int] = {}
        waiting: dict[fx.Node, list[fx.Node]] = {}
        for free in frees:
            wait = free.all_input_nodes[0]
            uses = {wait, *uses_of(*unpacks(wait))}
            if free.meta["phase"] == BACKWARD and border:
                uses.add(frame[border - 1])
            reads[free] = len(uses)
            for node in uses:
                waiting.setdefault(node, []).append(free)
        return Tasks(
            frame,
            [0.0 if node.target in ops.COPIES else self.cost[node] for node in frame],
            jobs,
            reads,
            waiting,
            border,
            [node for node in self.nodes if node.op == "placeholder"],
            self.program.output_node,
            self.cost,
            self.hardware.contention,
        )

    def _claim(self, node: fx.Node) -> Job:
        issue = [n for n in transfers_into(node) if n not in self.job_of]
        fetch = [n for n in issue if n.target is ops.to_device]
        issue = [n for n in issue if n.target is not ops.to_device]
        seconds, stream = self.cost[node], stream_of(node)
        job = Job(node, [*issue, node], [], stream, seconds, 0, 0, 0, fetch)
        job.local = local_seconds(node, self.program, self.hardware)
        for each in (*fetch, *job.issue):
            self.job_of[each] = job
        return job

    def _claim_wait(self, job: Job) -> None:
        wait = wait_of(job.collective)
        assert wait is not None
        picked = unpacks(wait)
        further = dict.fromkeys(n for one in picked for n in transfers_after(one))
        own = [n for n in sorted(further) if n not in self.job_of]
        job.sent = [n for n in own if n.target is ops.to_host]
        sent = set(job.sent)
        job.arrivals = [
            n
            for n in own
            if n.target is ops.arrive
            and n.args[0] in sent
            and all(user.op == "output" for user in n.users)
        ]
        late = {*job.arrivals}
        job.wait = [wait, *picked, *(n for n in own if n not in late)]
        for each in (*job.wait, *job.arrivals):
            self.job_of[each] = job

    def _bound(self, job: Job, at: dict[fx.Node, int], border: int, end: int) -> None:
        backward = job.collective.meta["phase"] == BACKWARD
        job.earliest = border if backward else 0
        stop = end if backward else border
        for node in (*job.fetch, *job.issue):
            for source in node.all_input_nodes:
                other = self.job_of.get(source)
                if source in at:
                    job.ready = max(job.ready, at[source] + 1)
                elif other is not None and other is not job:
                    job.after.add(other)
                    if job not in other.followers:
                        other.followers.append(job)
        readers = [at[user] for node in job.wait for user in node.users if user in at]
        job.need = min([stop, *readers])
