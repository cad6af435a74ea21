"""Calibration on CUDA, on a device of numbers: warm-up, queues, cold operands, contention."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

import graphshard
from graphshard.calibrate.bench import (
    MOST_RUNS,
    Beside,
    CudaBench,
    DeviceWatch,
    HostBench,
    Product,
    l2_bytes,
    sm_megahertz,
    warmed_up,
)
from graphshard.calibrate.probes import Cold, sized_probes
from graphshard.calibrate.run import calibrate
from graphshard.calibrate.steps import joined
from graphshard.cli.calibrate import report
from graphshard.hardware.hardware import Hardware
from graphshard.runtime.links import Effort

# -- a device of numbers ---------------------------------------------------------------------------


COMPUTE, SIDE = "compute", "side"


class Event:
    """An event that is complete at the time `at`, once the device was drained."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at: float | None = None

    def record(self, stream: str | None = None) -> None:
        self.at = None
        self.cuda.queue(stream or COMPUTE, _Item(self.cuda.host, event=self))

    def query(self) -> bool:
        self.cuda.drain()
        assert self.at is not None
        return self.at <= self.cuda.host

    def synchronize(self) -> None:
        self.cuda.drain()
        assert self.at is not None
        self.cuda.host = max(self.cuda.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        self.cuda.drain()
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


@dataclass
class _Item:
    """Something queued at the time `queued`: work, an event to record, or one to wait for."""

    queued: float
    seconds: float = 0.0
    event: Event | None = None
    awaited: Event | None = None


class FakeCuda:
    """What calibration uses of `torch.cuda`.

    lost: the parts of their speed that compute and the side stream lose while both are at work.
    """

    def __init__(
        self,
        *,
        lost: tuple[float, float] = (0.0, 0.0),
        l2: int = 1 << 20,
        free: int = 64 << 30,
        megahertz: float | None = 1500.0,
    ) -> None:
        self.host = 0.0
        self.l2, self.free, self.megahertz = l2, free, megahertz
        self.emptied = 0
        self.worked = 0.0
        self.work_by_stream: dict[str, int] = {COMPUTE: 0, SIDE: 0}
        self._speed = {COMPUTE: 1 - lost[0], SIDE: 1 - lost[1]}
        self._now = {COMPUTE: 0.0, SIDE: 0.0}
        self._items: dict[str, deque[_Item]] = {COMPUTE: deque(), SIDE: deque()}

    # -- as torch.cuda has it ---------------------------------------------------------------------

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802  # as torch's
        assert enable_timing
        return Event(self)

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(L2_cache_size=self.l2)

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        assert self.emptied
        return self.free, 2 * self.free

    def empty_cache(self) -> None:
        self.emptied += 1

    def clock_rate(self, device: Any) -> float:
        if self.megahertz is None:
            raise ModuleNotFoundError("no NVML")
        return self.megahertz

    # -- the device -------------------------------------------------------------------------------

    def launch(self, seconds: float, *, host: float = 5e-6, stream: str = COMPUTE) -> None:
        """The host takes `host` seconds to queue work of `seconds`."""
        self.host += host
        self.worked += seconds
        self.work_by_stream[stream] += 1
        self.queue(stream, _Item(self.host, seconds))

    def wait(self, stream: str, event: Event) -> None:
        self.queue(stream, _Item(self.host, awaited=event))

    def synchronize(self) -> None:
        self.drain()
        self.host = max(self.host, *self._now.values())

    def queue(self, stream: str, item: _Item) -> None:
        self._items[stream].append(item)

    def drain(self) -> None:
        """Do all that is queued."""
        while any(self._items.values()):
            if not any(self._without_work(stream) for stream in self._items):
                self._work()

    def _without_work(self, stream: str) -> bool:
        """Pass the events before the stream's next work; whether there was any."""
        items, passed = self._items[stream], False
        while items and not items[0].seconds:
            item = items[0]
            if item.awaited is not None:
                if item.awaited.at is None:
                    break
                self._now[stream] = max(self._now[stream], item.awaited.at)
            if item.event is not None:
                item.event.at = max(self._now[stream], item.queued)
            items.popleft()
            passed = True
        return passed

    def _work(self) -> None:
        """Work until the first stream is done with an item, or the other one begins."""
        begin: dict[str, float] = {}
        for stream, items in self._items.items():
            if items and items[0].seconds:
                begin[stream] = max(self._now[stream], items[0].queued)
        assert begin, "streams wait for what nobody records"
        start = min(begin.values())
        active = [stream for stream, at in begin.items() if at <= start]
        speed = {stream: self._speed[stream] if len(active) > 1 else 1.0 for stream in active}
        span = min(self._items[stream][0].seconds / speed[stream] for stream in active)
        waiting = [at - start for stream, at in begin.items() if stream not in active]
        span = min([span, *waiting])
        for stream in active:
            item = self._items[stream][0]
            item.seconds -= span * speed[stream]
            self._now[stream] = start + span
            if item.seconds <= 1e-15:
                self._items[stream].popleft()


# -- tests -----------------------------------------------------------------------------------------


CPU = torch.device("cpu")


class Alone:
    size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class Work:
    """Kernels of `seconds` each; `syncs`: the host waits for the device after each."""

    group = "work"

    def __init__(
        self, cuda: FakeCuda, seconds: float, host: float = 5e-6, *, wall=False, syncs=False
    ) -> None:
        self.cuda, self.seconds, self.host, self.wall, self.syncs = cuda, seconds, host, wall, syncs
        self.runs: list[int] = []

    def run(self, times: int) -> None:
        self.runs.append(times)
        for _ in range(times):
            self.cuda.launch(self.seconds, host=self.host)
            if self.syncs:
                self.cuda.synchronize()


class Timed(Product):
    """A product that takes what `seconds` yields next."""

    def __init__(self, cuda: FakeCuda, seconds) -> None:
        self.cuda, self.seconds = cuda, iter(seconds)
        self.name, self.flops = "product", 1.0

    def __call__(self) -> None:
        self.cuda.launch(next(self.seconds))


# -- warming up ------------------------------------------------------------------------------------


def falling(start: float, end: float, per_product: float):
    """Seconds of products whose clocks fall until they take `end`."""
    for count in itertools.count():
        yield end - (end - start) * math.exp(-count * per_product)


def test_it_is_warm_only_once_times_are_steady() -> None:
    cuda = FakeCuda()
    warmth = warmed_up(Timed(cuda, falling(1.5e-3, 2e-3, 1 / 700)), CPU, cuda)
    assert warmth.steady
    assert warmth.megahertz == 1500.0
    assert warmth.seconds == pytest.approx(2e-3, rel=0.015)
    assert warmth.spread <= 0.01
    earlier = warmth.batches[:-1][-20:]
    assert max(earlier) > 1.01 * min(earlier), "it ended no earlier than it was steady"
    assert cuda.worked > 1.0


def test_what_is_never_steady_ends_and_says_so() -> None:
    cuda = FakeCuda()
    restless = itertools.cycle([1e-3] * 64 + [2e-3] * 64)
    warmth = warmed_up(Timed(cuda, restless), CPU, cuda, most=3.0)
    assert not warmth.steady
    assert cuda.worked == pytest.approx(3.0, rel=0.1)
    tiny = warmed_up(Timed(cuda, itertools.repeat(1e-3)), CPU, cuda, least=0.0, most=1e-3)
    assert (len(tiny.batches), tiny.steady) == (1, False)


# -- the stopwatch ---------------------------------------------------------------------------------


def watch_of(cuda: FakeCuda, seconds: float = 1e-3) -> DeviceWatch:
    return DeviceWatch(Timed(cuda, itertools.repeat(seconds)), seconds, cuda)


def test_a_host_slower_than_the_device_is_not_in_its_times() -> None:
    cuda = FakeCuda()
    work = Work(cuda, 2e-6, host=50e-6)
    watch = watch_of(cuda)
    assert watch(work, 100) == pytest.approx(2e-6)
    assert len(work.runs) == 4, "5 ms to queue take 8 products of 1 ms before"
    assert watch(work, 100) == pytest.approx(2e-6)
    assert len(work.runs) == 5, "that many are known to be needed"
    assert watch.late == 0


def test_an_operator_that_waits_for_the_device_is_counted() -> None:
    cuda = FakeCuda()
    work = Work(cuda, 2e-6, host=10e-6, syncs=True)
    watch = watch_of(cuda)
    assert watch(work, 10) == pytest.approx(12e-6, rel=0.2)
    assert watch.late == 1
    tries = len(work.runs)
    watch(work, 10)
    assert len(work.runs) == tries + 1, "more products do not help it"
    assert watch.late == 1


def test_ranks_begin_together_and_time_as_often_as_each_other() -> None:
    cuda = FakeCuda()
    work = Work(cuda, 3e-5, host=3e-4, wall=True)  # a host later than expected
    watch = watch_of(cuda)
    watch(work, 20)
    assert work.runs == [1, 20]


# -- cold operands ---------------------------------------------------------------------------------


def ranges(operands: Any) -> set[tuple[int, int]]:
    tensors = [t for t in torch.utils._pytree.tree_leaves(operands) if isinstance(t, torch.Tensor)]
    return {(t.data_ptr(), t.nbytes) for t in tensors}


def test_operands_pass_a_cache_or_are_used_once_in_a_timing() -> None:
    bench = CudaBench(CPU, FakeCuda(l2=256 << 10), product_size=8)
    assert bench.cold == Cold(512 << 10, MOST_RUNS)
    assert bench.uncached_bytes == 512 << 10
    probes = list(sized_probes(CPU, (torch.bfloat16,), share=0.1, cold=bench.cold))
    assert len(probes) > 80
    turned = 0
    for probe in probes:
        count = len(probe.operands)
        assert count == MOST_RUNS or count * probe.call_bytes >= 512 << 10, probe.curve
        turned += 1 < count < MOST_RUNS
    assert turned > 10
    for probe in probes:
        if probe.curve in ("add", "matmul", "clone.bfloat16"):
            every = [ranges(operands) for operands in probe.operands]
            assert len(set().union(*every)) == sum(map(len, every)), "each set is memory of its own"


def test_optimizers_take_turns_beyond_the_cache() -> None:
    bench = CudaBench(CPU, FakeCuda(l2=50 << 20), product_size=8)
    assert bench.optimizer_copies(8 << 20) * (8 << 20) >= 100 << 20
    assert bench.optimizer_copies(1 << 10) == MOST_RUNS
    assert HostBench(CPU).optimizer_copies(1) == 1
    assert max(bench.shard_sizes()) == 1 << 23
    assert max(HostBench(CPU).shard_sizes()) == 1 << 20


# -- messages --------------------------------------------------------------------------------------


class Two(Alone):
    """Ranks of which the other one has this many bytes free."""

    size = 2

    def __init__(self, free: int) -> None:
        self.free = free

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.free]


def test_messages_go_to_512_mib_unless_a_rank_is_short_of_memory() -> None:
    bench = CudaBench(CPU, FakeCuda(free=70 << 30), product_size=8)
    assert bench.collective_bytes(Two(60 << 30))[-2:] == (128 << 20, 512 << 20)
    assert bench.notes() == []
    assert bench.collective_bytes(Two(4 << 30))[-1] == 128 << 20
    (note,) = bench.notes()
    assert note == "collectives end at 128.00 MiB, since memory is short"
    assert bench.collective_bytes(Two(1 << 30)) == HostBench(CPU).collective_bytes(Alone())


# -- contention ------------------------------------------------------------------------------------


class Gather:
    """A gather of the side stream."""

    def __init__(self, cuda: FakeCuda, seconds: float) -> None:
        self.cuda, self.seconds = cuda, seconds

    def start(self) -> Any:
        begun, done = (self.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        self.cuda.wait(SIDE, begun)
        self.cuda.launch(self.seconds, host=60e-6, stream=SIDE)
        done.record(SIDE)
        return done

    def finish(self, pending: Any) -> None:
        self.cuda.wait(COMPUTE, pending)

    def run(self, times: int) -> None:
        for _ in range(times):
            self.finish(self.start())


@pytest.mark.parametrize("lost", [(0.0, 0.0), (0.2, 0.05), (0.1, 0.4), (0.5, 0.0)])
@pytest.mark.parametrize("product", [3e-4, 4e-5])
def test_both_slowdowns_are_found(lost: tuple[float, float], product: float) -> None:
    cuda = FakeCuda(lost=lost)
    beside = Beside(
        Gather(cuda, 1.5e-3), lambda: cuda.launch(product), SIDE, watch_of(cuda, seconds=2e-3)
    )
    found = beside.contention(Alone())
    assert found.compute == pytest.approx(lost[0], abs=0.02)
    assert found.communication == pytest.approx(lost[1], abs=0.02)
    assert cuda.work_by_stream[SIDE] > 20


# -- the whole -------------------------------------------------------------------------------------


class HostEvent:
    """An event of a device whose work is done as soon as it is queued: the CPU."""

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


class HostCuda(FakeCuda):
    """The CPU as a CUDA device, by its own clock."""

    def Event(self, enable_timing: bool = False) -> Any:  # noqa: N802  # as torch's
        return HostEvent()


LOST = 0.37


class Bench(CudaBench):
    """As on CUDA, but for what compute loses: Gloo's gathers are not of a stream."""

    def contention(self, group: Any, timed: Any) -> float:
        assert 0 <= super().contention(group, timed) <= 1
        return LOST


def calibrated(rank: int) -> tuple[dict[str, Any], str, list[tuple[str, float]]]:
    bench = Bench(
        CPU,
        HostCuda(free=1 << 28),
        product_size=64,
        beside_size=32,
        step_width=64,
        large=(4 << 20, 1 << 30),
        largest_shard=1 << 12,
        gather_bytes=1 << 20,
    )
    rough = Effort(least=1, most=1, piece=0.0, budget=0.0)
    with joined(CPU) as group:
        found = calibrate(group, effort=rough, dtypes=(), share=0.1, bench=bench)
    return found.hardware.to_dict(), report(found), [(row.name, row.amount) for row in found.rows]


@pytest.mark.slow
def test_two_ranks_measure_as_on_cuda_and_simulations_have_the_contention() -> None:
    (first, text, rows), (second, _, _) = run_ranks(calibrated, 2, timeout=200)
    assert first == second
    hardware = Hardware(**first)
    assert hardware.contention == LOST
    assert hardware.about.endswith(", 1500 MHz at work")
    assert ("all_gather", 4.0 * 2**20) in rows
    assert max(amount for name, amount in rows if name == "all_gather") == 4 * 2**20
    assert ("product of 64.bfloat16", 2.0 * 64**3) in rows
    assert "collectives end at 4.00 MiB, since memory is short" in text
    assert "batches of products to warm up" in text
    assert "beside a gather of 1.00 MiB over 2 ranks products lose" in text
    assert "2 ranks sums lose" in text
    assert f"communication takes {LOST:.0%} of compute's speed" in text

    def seconds(contention: float) -> float:
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)]
        estimate = graphshard.simulate(
            torch.nn.Sequential(*layers),
            policy=graphshard.SizePolicy(1, forward_prefetch=1, merge_below=0),
            hardware=hardware.with_(contention=contention),
            world_size=2,
            example_inputs=(torch.ones(512, 256),),
        )
        return estimate.step_seconds

    assert seconds(LOST) > seconds(0.0)


def test_the_driver_need_not_tell() -> None:
    assert l2_bytes(CPU, FakeCuda(l2=0)) == 64 << 20
    assert l2_bytes(CPU, FakeCuda(l2=50 << 20)) == 50 << 20
    assert sm_megahertz(CPU, FakeCuda(megahertz=None)) is None
