"""What a calibration does in one way on the host and in another on a CUDA device; see README.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from graphshard.calibrate.probes import Cold
from graphshard.calibrate.steps import StepSize
from graphshard.format import human_bytes
from graphshard.program import ops
from graphshard.runtime.group import Group
from graphshard.runtime.links import (
    Benchmark,
    Stopwatch,
    TimedCollective,
    Timing,
    Watch,
    contention_on_host,
)

MOST_RUNS = 100
"""Runs of one timing: so few that the launches of all fit into the queue of a device."""


_BATCH_SECONDS = 0.05
"""Least seconds of a batch of products while the device warms up."""


_LAST = 20
"""Batches that must agree once it is warm."""


_TRIES = 4


class Product:
    """A product of two random matrices of `size` rows and columns, each time into the same result.

    Random since a device takes less power, and clocks higher, on zeros.
    """

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype) -> None:
        self.left, self.right = (torch.randn(size, size, device=device).to(dtype) for _ in "lr")
        self.out = torch.empty_like(self.left)
        self.flops = 2.0 * size**3
        self.name = f"product of {size}.{str(dtype).removeprefix('torch.')}"

    def __call__(self) -> None:
        """Queue it once."""
        torch.mm(self.left, self.right, out=self.out)


def l2_bytes(device: torch.device, cuda: Any = torch.cuda) -> int:
    """Bytes of the second-level cache of a CUDA device; 64 MiB where the driver does not tell."""
    known = getattr(cuda.get_device_properties(device), "L2_cache_size", 0)
    return int(known) or 64 << 20


def sm_megahertz(device: torch.device, cuda: Any = torch.cuda) -> float | None:
    """The clock of the multiprocessors in MHz, as NVML has it; None where NVML is not at hand."""
    try:
        return float(cuda.clock_rate(device))
    except Exception:  # NVML has errors of its own, by driver and by container
        return None


def event_pair(cuda: Any) -> tuple[Any, Any]:
    """Two events that can be timed."""
    return cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class Warmth:
    """The state of a device that has warmed up with products.

    name, flops: of a product. batches: seconds per product of each batch, the last ones last.
    steady: whether the last ones agree. megahertz: the clock meanwhile, if known.
    """

    name: str
    flops: float
    batches: tuple[float, ...]
    steady: bool
    megahertz: float | None

    @property
    def seconds(self) -> float:
        """Seconds per product once warm."""
        return median(self.batches[-_LAST:])

    @property
    def spread(self) -> float:
        """The range of the last batches, as a fraction of the least."""
        last = self.batches[-_LAST:]
        return max(last) / min(last) - 1


def warmed_up(
    product: Product,
    device: torch.device,
    cuda: Any = torch.cuda,
    *,
    least: float = 1.0,
    most: float = 10.0,
    within: float = 0.01,
) -> Warmth:
    """Run `product` until the time it takes is steady: the last batches agree `within` a fraction.

    It runs for `least` to `most` seconds of the device. `cuda` is `torch.cuda`, or what stands in
    for it in tests.
    """
    times, total, batches = 1, 0.0, list[float]()
    megahertz: float | None = None
    while True:
        begin, end = event_pair(cuda)
        begin.record()
        for _ in range(times):
            product()
        end.record()
        megahertz = sm_megahertz(device, cuda) or megahertz  # the device is at work
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        total += seconds
        if seconds < _BATCH_SECONDS / 2:
            times *= 2
            if total < most:
                continue
        batches.append(seconds / times)
        last = batches[-_LAST:]
        agree = len(last) == _LAST and max(last) <= (1 + within) * min(last)
        if (agree and total >= least) or total >= most:
            return Warmth(product.name, product.flops, tuple(batches), agree, megahertz)


@dataclass
class DeviceWatch:
    """A stopwatch for work that a CUDA device does.

    product: queued before what is timed. product_seconds: of one. cuda: `torch.cuda`, or what
    stands in for it. late: how many timings include waits for the host, after all tries.
    """

    product: Callable[[], Any]
    product_seconds: float
    cuda: Any = torch.cuda
    most_runs: int = MOST_RUNS
    late: int = 0
    _ahead: dict[int, int] = field(default_factory=dict, repr=False)

    def __call__(self, benchmark: Benchmark, times: int) -> float:
        """Return the seconds of the device per run of `benchmark`, over `times` runs.

        If the device began before the host had queued all of it, it is timed again behind twice as
        many products. Where other ranks take part it is timed once, since they must do the same,
        behind a run that makes all of them begin together.
        """
        if benchmark.wall:
            count = self.products_for(times * _HOST_SECONDS)
            return self._timed(benchmark, times, count, together=True)[0]
        count = self._ahead.get(id(benchmark), 1)
        for _ in range(_TRIES):
            seconds, in_time = self._timed(benchmark, times, abs(count), together=False)
            if in_time or count < 0:
                self._ahead[id(benchmark)] = count
                return seconds
            count *= 2
        # It waits for the device itself: no queue is long enough.
        self._ahead[id(benchmark)] = -1
        self.late += 1
        return seconds

    def products_for(self, seconds: float) -> int:
        """How many products keep the device at work for `seconds`; at least one."""
        return 1 + int(seconds / self.product_seconds)

    def _timed(
        self, benchmark: Benchmark, times: int, products: int, *, together: bool
    ) -> tuple[float, bool]:
        """(Seconds per run, whether the device reached it only when all was queued)."""
        begin, end = event_pair(self.cuda)
        for _ in range(products):
            self.product()
        if together:
            benchmark.run(1)
        begin.record()
        benchmark.run(times)
        end.record()
        in_time = not begin.query()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times, in_time


_HOST_SECONDS = 2e-4
"""What the host takes at most to queue a collective."""


GATHER_BYTES = 256 << 20
"""Bytes of the gather beside which a CUDA device computes."""


_GATHERS = 4


_ROUNDS = 5


@dataclass(frozen=True)
class Contention:
    """The fractions of their speed that compute and communication lose while both are under way."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Beside:
    """Gathers on their stream while a CUDA device computes on its own.

    gather: has `run`, `start` and `finish`. compute: queues work on the current stream. stream: the
    one that gathers run on. watch: the stopwatch of the device.
    """

    gather: Any
    compute: Callable[[], Any]
    stream: Any
    watch: DeviceWatch

    def seconds(self, gathers: int, count: int) -> tuple[float, float]:
        """(Seconds of `gathers` gathers, seconds of `count` computations), queued at once."""
        begin, moved = event_pair(self.watch.cuda)
        started, computed = event_pair(self.watch.cuda)
        for _ in range(self.watch.products_for(1e-3)):
            self.watch.product()
        if gathers:
            self.gather.run(1)  # so that all ranks begin together
        begin.record()
        pending = [self.gather.start() for _ in range(gathers)]
        moved.record(self.stream)
        started.record()
        for _ in range(count):
            self.compute()
        computed.record()
        for each in pending:
            self.gather.finish(each)
        moved.synchronize()
        computed.synchronize()
        return begin.elapsed_time(moved) / 1e3, started.elapsed_time(computed) / 1e3

    def contention(self, ranks: Group) -> Contention:
        """The mean over `ranks`, all of which must call this at the same point.

        Both take about as long alone, so that they are under way together for most of their time.
        """
        self.seconds(1, 1)  # warm up
        moving = median(self.seconds(_GATHERS, 0)[0] for _ in range(_ROUNDS))
        one = median(self.seconds(0, 8)[1] for _ in range(_ROUNDS)) / 8
        count = max(ranks.all_gather_object(max(1, round(moving / one))))
        computing = median(self.seconds(0, count)[1] for _ in range(_ROUNDS))
        both = [self.seconds(_GATHERS, count) for _ in range(_ROUNDS)]
        moving_beside, computing_beside = (median(each) for each in zip(*both, strict=True))
        together = min(moving_beside, computing_beside)
        found = (
            _lost(computing, computing_beside, together),
            _lost(moving, moving_beside, together),
        )
        of_ranks = zip(*ranks.all_gather_object(found), strict=True)
        return Contention(*(sum(each) / len(each) for each in of_ranks))


def _lost(alone: float, beside: float, together: float) -> float:
    """The fraction of its speed that work lost in the `together` of its `beside` seconds."""
    done = alone - (beside - together)  # of its seconds alone, what was done meanwhile
    return min(1.0, max(0.0, 1 - done / together))


Timed = Callable[[str, Sequence[Any]], list[Timing]]


_KIB = 1024


class HostBench:
    """Times by a clock of the host.

    cold: how operands are kept out of caches. uncached_bytes: operators that move as many fit in no
    cache. about: more on the device, for the hardware's description.
    """

    cold = Cold()
    uncached_bytes = 1 << 20
    about = ""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self) -> Warmth | None:
        """Bring the device to the clocks that it sustains; None on a CPU, which is as it is."""
        return None

    def watch(self) -> Stopwatch:
        """A stopwatch for one stage."""
        return Watch(self.device)

    def collective_bytes(self, ranks: Group, share: float = 1.0) -> tuple[int, ...]:
        """Bytes of the collectives to measure, the same on all `ranks`; a `share` of the sizes."""
        sizes = (16 * _KIB, 256 * _KIB, 2048 * _KIB, 8192 * _KIB, 32768 * _KIB)
        return sizes[: max(3, round(share * len(sizes)))]

    def shard_sizes(self) -> tuple[int, ...]:
        """Elements of the shards that optimizers are measured on."""
        return 1 << 8, 1 << 14, 1 << 18, 1 << 20

    def optimizer_copies(self, state_bytes: int) -> int:
        """How many optimizers take turns, so that no state is cached from the last step."""
        return 1

    def step_size(self, dtypes: Sequence[torch.dtype], share: float = 1.0) -> StepSize:
        """Sizes of the transformer whose step is timed; a `share` below 1 takes fewer tokens."""
        return StepSize(2, 512, 2048, max(1, round(4 * share)), 128, torch.float32)

    def contention(self, group: Group, timed: Timed) -> float:
        """The fraction of compute's speed that a collective of `group` under way takes from it."""
        return contention_on_host(group, timed)

    def notes(self) -> list[str]:
        """Sentences on how the measuring went."""
        return []


class CudaBench(HostBench):
    """Times by events of the device, warm, on operands that are in no cache.

    cuda: `torch.cuda`, or what stands in for it in tests, which also take smaller sizes.
    product_size: rows and columns of the products that keep the device at work; beside_size: of
    those, and of the sums, that are computed beside a gather of `gather_bytes`. step_width: of the
    transformer. large: bytes of the collectives beyond those of the host: a unit has as many, and
    NCCL reaches its full rate with no fewer. largest_shard: in elements.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        *,
        product_size: int = 8192,
        beside_size: int = 4096,
        step_width: int = 4096,
        large: tuple[int, ...] = (128 << 20, 512 << 20),
        largest_shard: int = 1 << 23,
        gather_bytes: int = GATHER_BYTES,
    ) -> None:
        super().__init__(device)
        self.cuda = cuda
        self.large, self.gather_bytes = large, gather_bytes
        self.largest_shard = largest_shard
        self.product = Product(device, product_size, torch.bfloat16)
        self.beside_size, self.step_width = beside_size, step_width
        cache = l2_bytes(device, cuda)
        self.uncached_bytes = 2 * cache
        self.cold = Cold(2 * cache, MOST_RUNS)
        self.warmth: Warmth | None = None
        self._watches: list[DeviceWatch] = []
        self._notes: list[str] = []

    def warm_up(self) -> Warmth:
        """Compute products until the time they take is steady."""
        self.warmth = warmth = warmed_up(self.product, self.device, self.cuda)
        if warmth.megahertz is not None:
            self.about = f", {warmth.megahertz:.0f} MHz at work"
        state = "steady" if warmth.steady else "not steady"
        self._notes.append(
            f"{len(warmth.batches)} batches of products to warm up, {state} within "
            f"{warmth.spread:.1%} at the end{self.about}"
        )
        return warmth

    def watch(self) -> DeviceWatch:
        """A stopwatch of events; warms up first if that was not done."""
        warmth = self.warmth or self.warm_up()
        watch = DeviceWatch(self.product, warmth.seconds, self.cuda)
        self._watches.append(watch)
        return watch

    def collective_bytes(self, ranks: Group, share: float = 1.0) -> tuple[int, ...]:
        """Bytes of the collectives to measure: as a unit has, if memory has room for them."""
        room, small = self._room(ranks), super().collective_bytes(ranks, share)
        fitting = tuple(size for size in self.large if size <= room)
        if len(fitting) < len(self.large):
            most = human_bytes(max(fitting, default=max(small)))
            self._notes.append(f"collectives end at {most}, since memory is short")
        return small + fitting

    def shard_sizes(self) -> tuple[int, ...]:
        """Elements of the shards that optimizers are measured on; the largest are in no cache."""
        return *super().shard_sizes(), self.largest_shard

    def optimizer_copies(self, state_bytes: int) -> int:
        """How many optimizers take turns, so that no state is cached from the last step."""
        return self.cold.sets(state_bytes)

    def step_size(self, dtypes: Sequence[torch.dtype], share: float = 1.0) -> StepSize:
        """Sizes by which kernels take longer than their launches; the first of `dtypes`."""
        dtype = next((d for d in dtypes if d.itemsize == 2), torch.float32)
        return StepSize(2, self.step_width, 32768, max(1, round(4 * share)), 2048, dtype)

    def contention(self, group: Group, timed: Timed) -> float:
        """What products lose; a note says what else does."""
        size = min(self.gather_bytes, self._room(group))
        left, right = torch.randn(2, self.beside_size, self.beside_size, device=self.device)
        computes: dict[str, Callable[[], Any]] = {
            "products": Product(self.device, self.beside_size, torch.bfloat16),
            "sums": lambda: torch.add(left, right),
        }
        gather = TimedCollective(ops.all_gather, group, 1, size)
        stream = None if group.side_stream is None else group.side_stream.stream
        watch, found = self.watch(), {}
        for name, compute in computes.items():
            found[name] = lost = Beside(gather, compute, stream, watch).contention(group)
            self._notes.append(
                f"beside a gather of {human_bytes(size)} over {group.size} ranks {name} lose "
                f"{lost.compute:.1%} of their speed, and the gather {lost.communication:.1%}"
            )
        return found["products"].compute

    def notes(self) -> list[str]:
        """Sentences on how the measuring went."""
        late = sum(watch.late for watch in self._watches)
        behind = f"{late} operators wait for the device themselves, which is in their times"
        return [*self._notes, *([behind] if late else [])]

    def _room(self, ranks: Group) -> int:
        """Bytes of a collective for which every rank has memory: a sixteenth of what is free."""
        self.cuda.empty_cache()
        free, _ = self.cuda.mem_get_info(self.device)
        return int(min(ranks.all_gather_object(free))) // 16


def bench_for(device: torch.device) -> HostBench:
    """The bench for ranks that compute on `device`."""
    return CudaBench(device) if device.type == "cuda" else HostBench(device)
