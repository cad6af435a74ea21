"""Time on a CUDA device: between its own events, at the clocks that it sustains.

Products of large random matrices are queued before whatever is timed. They keep the device at the
power, and so at the clocks, of a training step; they evict what was cached; and while they run the
host queues the work to time, so that the device never waits for the host inside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from graphshard.runtime.measure import Benchmark

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
