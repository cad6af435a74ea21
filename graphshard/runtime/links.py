"""The links between ranks, measured: within a host, and between hosts.

The collectives are those of a lowered program (see `lower.kind_of`), so copies, packing and
averaging are measured too. Both `compile` and a calibration measure with them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.cost.collective_cost import BETWEEN_NODES
from graphshard.errors import CostError
from graphshard.hardware.curves import fit_line
from graphshard.hardware.hardware import Hardware, nearest
from graphshard.planning.layout import ParamLayout
from graphshard.policy.placement import SHARDED
from graphshard.program import ops
from graphshard.runtime.collectives import Operand, wait
from graphshard.runtime.gather import Gathered, free
from graphshard.runtime.group import Group, hosts_by_rank
from graphshard.runtime.lower import kind_of


class Benchmark(Protocol):
    """An operation to time.

    group: its kind, for reports. wall: whether to use wall time instead of this thread's CPU time,
    as for ranks that wait for each other.
    """

    group: str
    wall: bool

    def run(self, times: int) -> None:
        """Run it `times` times, one after the other."""


class Stopwatch(Protocol):
    """What times a benchmark: a clock of the host, or events of a device."""

    @property
    def most_runs(self) -> int:
        """Runs of one timing at most."""

    def __call__(self, benchmark: Benchmark, times: int) -> float:
        """Return the seconds per run, over `times` runs."""


@dataclass(frozen=True)
class Effort:
    """The duration of a measurement.

    least, most: number of rounds. spread: a benchmark is done at this relative interquartile range.
    piece: least seconds of one timing by CPU time. budget: seconds after which no round begins,
    once `least` rounds are done.
    """

    least: int = 5
    most: int = 15
    spread: float = 0.05
    piece: float = 5e-4
    budget: float = 40.0


QUICK = Effort(least=3, most=3, piece=1e-4, budget=5.0)
"""The effort for a rough estimate."""


@dataclass
class Timing:
    """The measured seconds of one benchmark, for each round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range, as a fraction of the median."""
        if len(self.rounds) < 3:
            return 0.0
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.seconds


@dataclass(frozen=True)
class Watch:
    """A stopwatch for benchmarks on `device`, by a clock of the host."""

    device: torch.device
    most_runs: int = 1 << 20

    def __call__(self, benchmark: Benchmark, times: int) -> float:
        """Return the seconds per run of `benchmark`, over `times` runs.

        On one CPU thread this is the thread's CPU time, which other processes do not affect.
        """
        in_thread = (
            self.device.type == "cpu" and not benchmark.wall and torch.get_num_threads() == 1
        )
        clock = time.thread_time if in_thread else time.perf_counter
        timed_run = getattr(benchmark, "timed_run", None)
        if timed_run is not None:  # it times a part of itself
            return float(timed_run(times, clock))
        self.synchronize()
        begin = clock()
        benchmark.run(times)
        self.synchronize()
        return (clock() - begin) / times

    def synchronize(self) -> None:
        """Wait for all kernels on an accelerator."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_BY_CLOCK = 40
"""By the clock a piece is as many times as long: where a thread waits for a core, a small message
takes 0.1 ms or 4, and a step pays the mean of many."""


def measure(
    benchmarks: Sequence[Benchmark],
    watch: Stopwatch,
    ranks: Group,
    effort: Effort,
    done: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time `benchmarks` on all `ranks` at once, in the same order on each rank.

    The timings, one per benchmark, are averaged over ranks. `done` is called after each timing.
    """
    begin = time.perf_counter()
    counts = []
    with torch.no_grad():
        for benchmark in benchmarks:
            benchmark.run(1)  # warm up
            seconds = max(watch(benchmark, 1), 1e-7)
            piece = effort.piece * (_BY_CLOCK if benchmark.wall else 1)
            counts.append(min(watch.most_runs, max(1, round(piece / seconds))))
            done()
        counts = [max(each) for each in zip(*ranks.all_gather_object(counts), strict=True)]
        timings = [Timing() for _ in benchmarks]
        remaining = list(range(len(benchmarks)))
        for turn in range(effort.most):
            for index in remaining:
                timings[index].rounds.append(watch(benchmarks[index], counts[index]))
                done()
            if turn + 1 < effort.least:
                continue
            spread = [i for i in remaining if timings[i].spread > effort.spread]
            late = time.perf_counter() - begin > effort.budget
            reports = ranks.all_gather_object((spread, late))
            # All ranks must go on with the same benchmarks: some include collectives.
            remaining = sorted({index for indices, _ in reports for index in indices})
            if not remaining or any(is_late for _, is_late in reports):
                break
    return _mean_over(ranks, timings)


def _mean_over(ranks: Group, timings: list[Timing]) -> list[Timing]:
    rounds = ranks.all_gather_object([timing.rounds for timing in timings])
    if len(rounds) == 1:
        return timings
    return [
        Timing([sum(each) / len(each) for each in zip(*(sorted(r) for r in of_work), strict=True)])
        for of_work in zip(*rounds, strict=True)
    ]


TENSORS = (1, 8)
"""Numbers of tensors that a measured collective moves."""


OPERATIONS = (ops.all_gather, ops.reduce_scatter, ops.all_reduce)


_SIZES = (1 << 14, 1 << 20, 1 << 22)  # a network may let less than 1 MiB pass at more than its rate


_GATHER_BYTES = 8 << 20
"""Bytes of the gather beside which CPU ranks compute."""


_EFFORT = Effort(least=3, most=3, piece=1e-4, budget=3.0)


Lines = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class _Measured:
    """The preset, the lines, and what compute loses beside a collective; None: as in the preset."""

    preset: str
    lines: Lines
    contention: float | None = None


_measured: dict[tuple[str, ...], _Measured] = {}
"""What this process knows, by the hosts of the ranks and what they run on."""


def measured_on(group: Group) -> Hardware:
    """The preset most like this rank's device, on the links between the ranks as they are now.

    It takes one to five seconds. Every rank of `group`, more than one, must call this at the same
    point, and gets the figures of rank 0. A process that has measured the same hosts before does
    not again. It is the preset itself if the hosts have different numbers of ranks, which no figure
    describes.
    """
    hosts = hosts_by_rank(group)
    per_host = set(Counter(hosts).values())
    key = (*hosts, group.runs_on)
    known: list[Any] = group.all_gather_object(_measured.get(key))
    if None in known:
        known = group.all_gather_object(_measured_now(group, hosts if len(per_host) == 1 else ()))
    # Ranks that measured in other groups know other figures, and all must time on the same.
    found = _measured[key] = known[0]
    base = Hardware.load(found.preset)
    if not found.lines:
        return base
    figures = link_figures(found.lines)
    return base.with_(
        name=f"{base.name} on links measured now ({_shown(figures)})",
        gpus_per_node=max(per_host),
        lines={**base.lines, **found.lines},
        contention=base.contention if found.contention is None else found.contention,
        **figures,
    )


def _measured_now(group: Group, hosts: Sequence[str]) -> _Measured:
    """Measure between `hosts`; nothing if there are none."""

    def timed(_: str, benchmarks: Sequence[Any]) -> list[Timing]:
        return measure(benchmarks, Watch(group.device), group, _EFFORT)

    lines: Lines = {}
    contention = None
    groups = host_groups(group, hosts) if hosts else HostGroups(0, 0, None, None)
    for ranks, ending in ((groups.within, ""), (groups.between, BETWEEN_NODES)):
        if ranks is not None:
            moves = timed_collectives(ranks, _SIZES)
            lines |= ring_lines(moves, timed("collectives", moves), ranks.size, ending)
            if group.device.type == "cpu":
                contention = contention_on_host(ranks, timed)
    groups.end()
    return _Measured(nearest(group.device), lines, contention)


def timed_collectives(ranks: Group, sizes: Sequence[int]) -> list[TimedCollective]:
    """Every collective over `ranks`, of each of `sizes` bytes and in one tensor or in several."""
    return [
        TimedCollective(op, ranks, tensors, size)
        for op in OPERATIONS
        for size in sizes
        for tensors in TENSORS
    ]


def ring_lines(
    moves: Sequence[TimedCollective], timings: Sequence[Timing], ranks: int, ending: str
) -> Lines:
    """The line of each collective (see `Hardware.lines`), by its name with `ending`.

    A call costs at least what one more tensor costs: where timings are disturbed, the two could not
    be told apart, and a call that costs nothing makes it worthless to merge small ones.
    """
    # The hops, the call with its tensors, and the bytes that pass a rank.
    hops, passing = ranks - 1, (ranks - 1) / ranks
    fitted = fitted_lines(moves, timings, lambda m: (hops, 1 + m.tensors, passing * m.size))
    return {
        f"{op}{ending}": (hop + tensor / (ranks - 1), tensor, byte)
        for op, (hop, tensor, byte) in fitted.items()
    }


def link_figures(lines: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The bandwidths and latencies in `Hardware` that the lines of gathers give."""
    figures: dict[str, Any] = {}
    for ending, link in (("", "intra"), (BETWEEN_NODES, "inter")):
        line = lines.get(f"all_gather{ending}")
        if line is not None:
            figures[f"{link}_bandwidth"] = 1 / max(line[2], 1e-15)
            figures[f"{link}_latency"] = max(line[0], 1e-9)
    return figures


def _shown(figures: Mapping[str, float]) -> str:
    links = {"intra": "within a host", "inter": "between hosts"}
    return "; ".join(
        f"{figures[f'{link}_bandwidth'] / 1e9:.2g} GB/s and "
        f"{1e3 * figures[f'{link}_latency']:.2g} ms {where}"
        for link, where in links.items()
        if f"{link}_bandwidth" in figures
    )


@dataclass(frozen=True)
class HostGroups:
    """The hosts of the ranks, with groups of the ranks on this host, and of one rank per host.

    made: those of the groups that were made for this; `end` frees them.
    """

    hosts: int
    per_host: int
    within: Group | None
    between: Group | None
    made: tuple[Group, ...] = ()

    def end(self) -> None:
        """Destroy the process groups that were made."""
        for group in self.made:
            dist.destroy_process_group(group.process_group)


def host_groups(group: Group, hosts: Sequence[str]) -> HostGroups:
    """Make groups to measure within and between `hosts`, the name of each rank's in order.

    Every rank must call this at the same point.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(sizes) > 1:
        raise CostError(
            f"the hosts have {sorted(sizes)} ranks; start equally many on each, so that they share "
            "their network alike"
        )
    per_host = sizes.pop()
    if len(members) == 1:
        return HostGroups(1, per_host, group if group.size > 1 else None, None)
    if per_host == 1:
        return HostGroups(len(members), 1, None, group)
    within = members[hosts[group.rank]]
    between = [ranks[within.index(group.rank)] for ranks in members.values()]
    made = tuple(group.new_group(ranks, callers=group.size) for ranks in (within, between))
    return HostGroups(len(members), per_host, made[0], made[1], made)


@dataclass
class TimedCollective:
    """A collective on `tensors` parameters of `size` bytes in all, from launch to free."""

    op: Any
    ranks: Group
    tensors: int
    size: int
    group: str = "collectives"
    wall: bool = True
    _launch: Callable[[], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.ranks.size
        rows = max(1, self.size // (4 * self.tensors * n))
        self.size = rows * 4 * self.tensors * n  # rounded to whole shards
        layouts = [
            ParamLayout(
                f"p{i}",
                (f"p{i}",),
                (rows * n,),
                torch.float32,
                requires_grad=True,
                placement=SHARDED,
                world_size=n,
            )
            for i in range(self.tensors)
        ]
        operands = [Operand(layout, torch.float32) for layout in layouts]
        op = ops.OPS[self.op]
        collective = kind_of(op, self.ranks)(self.ranks, "measured", "forward", operands)
        whole = op.takes is ops.Value.FULL
        if op.gives is op.takes:
            self.size = rows * 4 * self.tensors  # shards are moved
        numel = rows * n if whole else rows
        tensors = [torch.ones(numel, device=self.ranks.device) for _ in layouts]
        self._launch = lambda: collective(tensors)

    @property
    def name(self) -> str:
        """The collective's name."""
        return str(self.op.__name__)

    def start(self) -> Any:
        """Launch it and return its pending result."""
        return self._launch()

    def finish(self, pending: Any) -> None:
        """Wait for it, and free gathered tensors."""
        results = wait(pending)
        if isinstance(results, Gathered):
            free(results)

    def run(self, times: int) -> None:
        """Launch and finish it, `times` times."""
        for _ in range(times):
            self.finish(self.start())


def fitted_lines(
    benchmarks: Sequence[Any], timings: Sequence[Timing], features: Callable[[Any], Sequence[float]]
) -> dict[str, tuple[float, ...]]:
    """Return the fitted line of each benchmark, by name."""
    points: dict[str, list[tuple[Sequence[float], float]]] = defaultdict(list)
    for benchmark, timing in zip(benchmarks, timings, strict=True):
        points[benchmark.name].append((features(benchmark), timing.seconds))
    return {
        name: fit_line([row for row, _ in measurements], [seconds for _, seconds in measurements])
        for name, measurements in points.items()
    }


@dataclass
class TimedCompute:
    """Matrix products, alone or while the collective `under` is under way."""

    product: Tensor
    count: int
    under: TimedCollective | None
    group: str = "contention"
    wall: bool = True

    def run(self, times: int) -> None:
        """Compute `count` products, `times` times."""
        for _ in range(times):
            pending = None if self.under is None else self.under.start()
            for _ in range(self.count):
                torch.mm(self.product, self.product)
            if self.under is not None:
                self.under.finish(pending)


def contention_on_host(group: Group, timed: Callable[[str, Sequence[Any]], list[Timing]]) -> float:
    """The fraction of compute's speed that a gather under way takes from products on CPU ranks."""
    gather = TimedCollective(ops.all_gather, group, 1, _GATHER_BYTES)
    product = torch.ones(256, 256, device=group.device)
    products = TimedCompute(product, 20, None)
    gather_alone, products_alone = timed("contention", [gather, products])
    # Products that take about twice as long as the gather.
    count = max(20, round(40 * gather_alone.seconds / products_alone.seconds))
    count = max(group.all_gather_object(count))
    without, during = timed(
        "contention", [TimedCompute(product, count, None), TimedCompute(product, count, gather)]
    )
    slowdown = (during.seconds - without.seconds) / gather_alone.seconds
    return min(1.0, max(0.0, slowdown))
