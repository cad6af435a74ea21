"""The cost of each unit of a plan: its seconds, and the bytes it holds over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphshard.cost.memory import MemoryCurve
from graphshard.cost.streams import COMPUTE
from graphshard.cost.timeline import Timeline, Transfer
from graphshard.planning.plan import ShardingPlan
from graphshard.program.storages import END, Storage, changes


@dataclass(frozen=True)
class HoldingPeriod:
    """A period over which a unit holds bytes of one category without a pause.

    `bytes` is the maximum held at once in it. `start` and `end` are seconds after the step began;
    a period of storages that outlive the step ends with the step.
    """

    category: str
    bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class UnitEstimate:
    """The cost of one unit in a step.

    fqn: the unit's module, "" for the root. compute, communication: seconds of its compute nodes,
    and of its collectives and host copies. exposed: seconds compute waits for them. transfers: its
    collectives and host copies, in order. at_peak: bytes it holds at the step's peak, by category.
    held: the periods over which it holds storages that the step allocates.
    """

    fqn: str
    compute: float
    communication: float
    exposed: float
    transfers: tuple[Transfer, ...]
    at_peak: Mapping[str, int]
    held: tuple[HoldingPeriod, ...]

    def most(self, category: str) -> int:
        """The maximum bytes of `category` that it holds at once."""
        periods = (period for period in self.held if period.category == category)
        return max((period.bytes for period in periods), default=0)

    def seconds_held(self, category: str) -> float:
        """Seconds for which it holds any bytes of `category`."""
        periods = (period for period in self.held if period.category == category)
        return sum(period.end - period.start for period in periods)


def units_of(
    plan: ShardingPlan, timeline: Timeline, memory: MemoryCurve, step_seconds: float
) -> tuple[UnitEstimate, ...]:
    """Estimate each unit of `plan`, in the plan's order.

    Args:
        plan: the plan of the program.
        timeline: of the program.
        memory: of the program.
        step_seconds: the whole step, the optimizer included.
    """
    compute: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.stream == COMPUTE:
            compute[span.unit] += span.seconds
    transfers: dict[str, list[Transfer]] = defaultdict(list)
    for transfer in timeline.transfers:
        transfers[transfer.span.unit].append(transfer)
    storages: dict[str, dict[str, list[Storage]]] = defaultdict(lambda: defaultdict(list))
    for storage in memory.storages:
        if storage.size:
            storages[storage.unit][storage.kind].append(storage)
    return tuple(
        UnitEstimate(
            unit.fqn,
            compute[unit.fqn],
            sum(transfer.span.seconds for transfer in transfers[unit.fqn]),
            sum(transfer.exposed for transfer in transfers[unit.fqn]),
            tuple(transfers[unit.fqn]),
            memory.by_unit.get(unit.fqn, {}),
            tuple(
                period
                for category, same_kind in storages[unit.fqn].items()
                for period in _periods(category, same_kind, timeline.at, step_seconds)
            ),
        )
        for unit in plan.units
    )


def _periods(
    category: str, storages: Iterable[Storage], at: Sequence[float], step_end: float
) -> list[HoldingPeriod]:
    """The periods over which any of `storages` is alive; `at`: seconds by place."""
    periods: list[HoldingPeriod] = []
    live = most = start = 0
    for place, freed, new in changes(storages):
        before, live = live, live - sum(storage.size for storage in freed)
        if before and not live and not new:
            periods.append(_period(category, most, start, place, at, step_end))
        if new and not before:
            start, most = place, 0
        live += sum(storage.size for storage in new)
        most = max(most, live)
    if live:  # storages that outlive the step
        periods.append(_period(category, most, start, END, at, step_end))
    return periods


def _period(
    category: str, most: int, born: int, freed: int, at: Sequence[float], step_end: float
) -> HoldingPeriod:
    start = at[born - 1] if born else 0.0
    return HoldingPeriod(category, most, start, at[freed - 1] if freed <= len(at) else step_end)
