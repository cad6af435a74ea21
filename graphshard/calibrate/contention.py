"""What compute and a collective that runs beside it take from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from graphshard.calibrate.device_time import DeviceWatch, event_pair
from graphshard.calibrate.ranks import TimedCompute
from graphshard.program import ops
from graphshard.runtime.group import Group
from graphshard.runtime.links import TimedCollective
from graphshard.runtime.measure import Ranks, Timing

GATHER_BYTES = 256 << 20
"""Bytes of the gather beside which a CUDA device computes."""


_HOST_GATHER_BYTES = 8 << 20


_GATHERS = 4


_ROUNDS = 5


@dataclass(frozen=True)
class Contention:
    """The fractions of their speed that compute and communication lose while both are under way."""

    compute: float
    communication: float


def on_host(group: Group, timed: Callable[[str, Sequence[Any]], list[Timing]]) -> float:
    """The fraction of compute's speed that a gather under way takes from products on CPU ranks."""
    gather = TimedCollective(ops.all_gather, group, 1, _HOST_GATHER_BYTES)
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

    def contention(self, ranks: Ranks) -> Contention:
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


def on_device(
    group: Group, computes: dict[str, Callable[[], Any]], watch: DeviceWatch, size: int
) -> dict[str, Contention]:
    """Contention between a gather of `size` bytes and each of `computes` on CUDA ranks, by name."""
    gather = TimedCollective(ops.all_gather, group, 1, size)
    stream = None if group.side_stream is None else group.side_stream.stream
    found = {}
    for name, compute in computes.items():
        found[name] = Beside(gather, compute, stream, watch).contention(group)
    return found
