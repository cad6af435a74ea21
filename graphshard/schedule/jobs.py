"""A finished program as a table: the nodes that stay in order, and the jobs that may move.

The frame has the nodes that stay: compute, copies of activations, parts kept by `reshard`, and
accumulated gradients. A job is a collective with the transfers into it, and its wait with the
transfers after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphshard.cost.streams import NodeCost, local_seconds, stream_of
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.aliases import transfers_after, transfers_into, unpacks, uses_of
from graphshard.program.annotations import Budget
from graphshard.program.collective import wait_of
from graphshard.program.program import BACKWARD, Program


@dataclass(eq=False)
class Job:
    """One collective with the nodes that move with it.

    issue: the casts of its operands, and the collective. wait: its wait and the nodes right after
    it. stream, seconds: the stream it occupies, and for how long.

    Places are positions in the frame. ready: its operands are computed before it. need: its result
    is first read there, or its phase ends there. earliest: its phase begins there.

    from_host: copies of its shards to the device. to_host: copies of its results to the host.
    arrivals: the `arrive` nodes of `to_host`. after: jobs whose results it reads. followers: jobs
    that read its results. extra_bytes: bytes it holds if a gather is issued earlier, or a reduce is
    waited for later, than necessary. local: seconds of compute that launching it takes.
    """

    collective: fx.Node
    issue: list[fx.Node]
    wait: list[fx.Node]
    stream: str
    seconds: float
    ready: int
    need: int
    earliest: int
    from_host: list[fx.Node] = field(default_factory=list)
    to_host: list[fx.Node] = field(default_factory=list)
    arrivals: list[fx.Node] = field(default_factory=list)
    after: set[Job] = field(default_factory=set)
    followers: list[Job] = field(default_factory=list)
    extra_bytes: int = 0
    local: float = 0.0

    @property
    def is_gather(self) -> bool:
        """Whether it is an all_gather."""
        return self.collective.target is ops.all_gather

    @property
    def queue(self) -> str:
        """The name of the jobs among which its place in the order is fixed."""
        if self.is_gather:
            return "gather"
        return "average" if ops.group_of(self.collective) == ops.REPLICATE else "reduce"


@dataclass
class JobTable:
    """The frame and the jobs of a program.

    frame: the nodes that stay in order. seconds: by frame node, its seconds on the compute stream.
    jobs: in the program's order. reads: by free, how many nodes must stand before it. frees: by
    node, the frees that must stand after it. border: the first frame place of backward. head, tail:
    the placeholders, and the output. cost: by node, its cost on its stream. hardware: the machine,
    which says how much communication slows compute.
    """

    frame: list[fx.Node]
    seconds: list[float]
    jobs: list[Job]
    reads: dict[fx.Node, int]
    frees: dict[fx.Node, list[fx.Node]]
    border: int
    head: list[fx.Node]
    tail: fx.Node
    cost: Mapping[fx.Node, NodeCost]
    hardware: Hardware

    @classmethod
    def of(cls, program: Program, budget: Budget, cost: Mapping[fx.Node, NodeCost]) -> JobTable:
        """The table of `program`, timed on the hardware of `budget`; `cost`: by node."""
        return _TableBuilder(program, budget, cost).table()

    def with_early_frees(self, order: Iterable[fx.Node]) -> list[fx.Node]:
        """`order` with each free right after the last use of the parameters it frees."""
        reads = dict(self.reads)
        moved: list[fx.Node] = []
        for node in order:
            if node not in reads:
                moved.append(node)
            for free in self.frees.get(node, ()):
                reads[free] -= 1
                if not reads[free]:
                    moved.append(free)
        return moved


class _TableBuilder:
    def __init__(self, program: Program, budget: Budget, cost: Mapping[fx.Node, NodeCost]) -> None:
        self.program, self.hardware, self.cost = program, budget.hardware, cost
        self.nodes = list(program.graph.nodes)
        self.job_of: dict[fx.Node, Job] = {}  # by each of its nodes

    def table(self) -> JobTable:
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
            self._set_bounds(job, at, border, len(frame))
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
        return JobTable(
            frame,
            [0.0 if node.target in ops.COPIES else self.cost[node].seconds for node in frame],
            jobs,
            reads,
            waiting,
            border,
            [node for node in self.nodes if node.op == "placeholder"],
            self.program.output_node,
            self.cost,
            self.hardware,
        )

    def _claim(self, node: fx.Node) -> Job:
        """Make a job of a collective and the transfers into it."""
        issue = [n for n in transfers_into(node) if n not in self.job_of]
        from_host = [n for n in issue if n.target is ops.to_device]
        issue = [n for n in issue if n.target is not ops.to_device]
        seconds, stream = self.cost[node].seconds, stream_of(node)
        job = Job(node, [*issue, node], [], stream, seconds, 0, 0, 0, from_host)
        job.local = local_seconds(node, self.program, self.hardware)
        for each in (*from_host, *job.issue):
            self.job_of[each] = job
        return job

    def _claim_wait(self, job: Job) -> None:
        """Add the wait of a job and the transfers after it."""
        wait = wait_of(job.collective)
        results = unpacks(wait)
        further = dict.fromkeys(n for result in results for n in transfers_after(result))
        transfers = [n for n in sorted(further) if n not in self.job_of]
        job.to_host = [n for n in transfers if n.target is ops.to_host]
        copies = set(job.to_host)
        job.arrivals = [
            n
            for n in transfers
            if n.target is ops.arrive
            and n.args[0] in copies
            and all(user.op == "output" for user in n.users)
        ]
        arrivals = {*job.arrivals}
        job.wait = [wait, *results, *(n for n in transfers if n not in arrivals)]
        for each in (*job.wait, *job.arrivals):
            self.job_of[each] = job

    def _set_bounds(self, job: Job, at: dict[fx.Node, int], border: int, end: int) -> None:
        """Set the places of a job and the jobs it depends on."""
        backward = job.collective.meta["phase"] == BACKWARD
        job.earliest = border if backward else 0
        stop = end if backward else border
        for node in (*job.from_host, *job.issue):
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
