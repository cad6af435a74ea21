"""What a calibration does in one way on the host and in another on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from graphshard.calibrate.device_time import (
    MOST_RUNS,
    DeviceWatch,
    Product,
    Warmth,
    event_pair,
    l2_bytes,
    warmed_up,
)
from graphshard.calibrate.probes import Cold
from graphshard.calibrate.steps import StepSize
from graphshard.format import human_bytes
from graphshard.program import ops
from graphshard.runtime.group import Group
from graphshard.runtime.links import TimedCollective, contention_on_host
from graphshard.runtime.measure import Stopwatch, Timing, Watch

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
