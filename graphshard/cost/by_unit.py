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
class Held:
    """Bytes of one category that a unit holds without a pause, from `start` to `end`.

    bytes are the most it holds at once between them; times are seconds after the step began, the
    end that of the whole step for what outlives it.
    """

    category: str
    bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class UnitEstimate:
    """What one unit costs.

    Seconds of its compute and of its collectives, those that compute had to wait for (`exposed`);
    the collectives and host copies themselves, in order; the bytes it holds at the step's peak, by
    category; and what the step allocates for it, and when it holds that.
    """

    fqn: str
    compute: float
    communication: float
    exposed: float
    transfers: tuple[Transfer, ...]
    at_peak: Mapping[str, int]
    held: tuple[Held, ...]

    def most(self, category: str) -> int:
        """The most bytes of `category` it holds at once."""
        return max((held.bytes for held in self.held if held.category == category), default=0)

    def seconds_held(self, category: str) -> float:
        """How long it holds anything of `category`."""
        return sum(held.end - held.start for held in self.held if held.category == category)


def units_of(
    plan: ShardingPlan, timeline: Timeline, memory: MemoryCurve, step_seconds: float
) -> tuple[UnitEstimate, ...]:
    """The units of `plan`, in its order."""
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
                held
                for category, alike in storages[unit.fqn].items()
                for held in _intervals(category, alike, timeline.at, step_seconds)
            ),
        )
        for unit in plan.units
    )


def _intervals(
    category: str, storages: Iterable[Storage], at: Sequence[float], until: float
) -> list[Held]:
    """The times over which some of `storages` live, and the most bytes that do at once."""
    intervals: list[Held] = []
    live = most = start = 0
    for place, gone, new in changes(storages):
        before, live = live, live - sum(storage.size for storage in gone)
        if before and not live and not new:
            intervals.append(_held(category, most, start, place, at, until))
        if new and not before:
            start, most = place, 0
        live += sum(storage.size for storage in new)
        most = max(most, live)
    if live:  # what outlives the step
        intervals.append(_held(category, most, start, END, at, until))
    return intervals


def _held(
    category: str, most: int, born: int, freed: int, at: Sequence[float], until: float
) -> Held:
    start = at[born - 1] if born else 0.0
    return Held(category, most, start, at[freed - 1] if freed <= len(at) else until)
