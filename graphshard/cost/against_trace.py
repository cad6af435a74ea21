"""An estimate beside what a profiler measured of the same program, event by event."""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from graphshard.cost.colours import WAIT
from graphshard.cost.estimate import Estimate
from graphshard.errors import CostError
from graphshard.format import human_seconds, table
from graphshard.plain_data import is_number
from graphshard.program import ops
from graphshard.program.program import BACKWARD, COMPUTE, FORWARD, Event

HALVES = {f"graphshard {phase}": phase for phase in (FORWARD, BACKWARD)}
"""The phase by the name of the range around a whole forward or backward."""


_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MOST_BYTES = 1 << 32
_MICROSECOND = 1e-6
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Kernel:
    """Work on a stream of the device, from `begin` to `end` seconds."""

    stream: str
    begin: float
    end: float


@dataclass(frozen=True)
class MeasuredEvent:
    """One range: its name, the host's time in it in seconds, and the kernels it launched."""

    name: str
    begin: float
    end: float
    kernels: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class Half:
    """A forward or backward of the trace, with its events in their order."""

    phase: str
    begin: float
    end: float
    events: tuple[MeasuredEvent, ...]


@dataclass(frozen=True)
class MeasuredRun:
    """The forwards and backwards that a trace shows.

    halves: in the order of their begins. rank: of the process that was traced; None if the trace
    does not say. on_device: it has kernels of the halves.
    """

    path: Path
    halves: tuple[Half, ...]
    rank: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether it shows the kernels of a device."""
        return any(event.kernels for half in self.halves for event in half.events)


@dataclass(frozen=True)
class _Range:
    name: str
    category: str
    thread: tuple[str, str]
    begin: float
    end: float
    args: Mapping[str, Any]


def read_trace(path: Path) -> MeasuredRun:
    """The forwards and backwards in a trace of torch.profiler (Chrome's JSON, plain or gzipped)."""
    data = _parsed(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise CostError(
            f"{path} is no trace of torch.profiler: it has no list `traceEvents`; pass a file that "
            "`prof.export_chrome_trace(...)` or `tensorboard_trace_handler` wrote"
        )
    ranges = [found for found in map(_range_of, events) if found is not None]
    halves = _halves(ranges)
    if not halves:
        raise CostError(
            f"{path} shows no forward or backward of a sharded module: it has no range named "
            f"{' or '.join(map(repr, HALVES))}; call the module inside torch.profiler.profile "
            "while it records (replays of CUDA graphs have no ranges)"
        )
    return MeasuredRun(path, tuple(halves), _rank(data))


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            packed = stream.read(len(_GZIP)) == _GZIP
            stream.seek(0)
            unpacked = gzip.GzipFile(fileobj=stream) if packed else stream
            raw = unpacked.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CostError(f"the trace {path} cannot be read: {error}") from error
    if len(raw) > _MOST_BYTES:
        raise CostError(f"the trace {path} is longer than {_MOST_BYTES:,} bytes; trace fewer steps")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CostError(
            f"{path} is no trace of torch.profiler: it is no JSON ({str(error)[:80]}); a trace "
            "that is still being written or was cut off cannot be read"
        ) from error


def _rank(data: Any) -> int | None:
    info = data.get("distributedInfo") if isinstance(data, dict) else None
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if type(rank) is int else None


def _range_of(event: Any) -> _Range | None:
    """The complete event ("X") that an entry of a trace is; None for other entries."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    name: Any = event.get("name")
    begin: Any = event.get("ts")
    duration: Any = event.get("dur", 0)
    if type(name) is not str or not (is_number(begin) and is_number(duration)):
        return None
    args = event.get("args")
    return _Range(
        name,
        str(event.get("cat", "")),
        (str(event.get("pid")), str(event.get("tid"))),
        begin * _MICROSECOND,
        (begin + duration) * _MICROSECOND,
        args if isinstance(args, dict) else {},
    )


def _halves(ranges: Iterable[_Range]) -> list[Half]:
    """The halves, by their begins, with the named ranges inside of each on its thread."""
    by_thread: dict[tuple[str, str], list[_Range]] = defaultdict(list)
    kernels: dict[Any, list[Kernel]] = defaultdict(list)
    launches: dict[tuple[str, str], list[tuple[float, Any]]] = defaultdict(list)
    for found in ranges:
        correlation = found.args.get("correlation")
        correlation = correlation if type(correlation) is int else None
        if found.category in _ON_DEVICE:
            stream = f"{found.args.get('device')}/{found.args.get('stream')}"
            kernels[correlation].append(Kernel(stream, found.begin, found.end))
        elif found.category in _LAUNCHES:
            launches[found.thread].append((found.begin, correlation))
        elif not found.category.startswith("gpu_"):
            by_thread[found.thread].append(found)
    halves = []
    for thread, on_thread in by_thread.items():
        on_thread.sort(key=lambda r: r.begin)
        launched = sorted(launches[thread], key=lambda pair: pair[0])
        begins = [r.begin for r in on_thread]
        for whole in on_thread:
            if whole.name in HALVES:
                phase = HALVES[whole.name]
                first, last = bisect_left(begins, whole.begin), bisect_right(begins, whole.end)
                events = tuple(
                    MeasuredEvent(r.name, r.begin, r.end, tuple(_kernels_in(r, launched, kernels)))
                    for r in on_thread[first:last]
                    if r.end <= whole.end and r.name.endswith(f" {phase}") and r.name not in HALVES
                )
                halves.append(Half(phase, whole.begin, whole.end, events))
    return sorted(halves, key=lambda half: half.begin)


def _kernels_in(
    named: _Range, launched: list[tuple[float, Any]], kernels: Mapping[Any, list[Kernel]]
) -> Iterable[Kernel]:
    first = bisect_left(launched, named.begin, key=lambda pair: pair[0])
    for begin, correlation in islice(launched, first, None):
        if begin > named.end:
            return
        yield from kernels.get(correlation, ())


ON_COMPUTE, EXPOSED, COMMUNICATION, OTHER = "compute", "exposed", "communication", "other"
"""The kinds of events: work on the compute stream, waits, work beside it, and frees."""


@dataclass(frozen=True)
class ComparedEvent:
    """One event of a program, in seconds.

    node: the name of its first node in the dump.
    kind: compute, exposed (a wait), communication (a collective or copy) or other (a free).
    predicted: time on the event's stream, or for a wait the time that compute stands still.
    measured: the same, the median over steps; None for communication in a trace without a device,
        as it goes on in threads that have no ranges. host: seconds that its code took the host.
    """

    event: Event
    node: str
    kind: str
    predicted: float
    measured: float | None
    host: float

    @property
    def difference(self) -> float:
        """Measured less predicted seconds; 0 where nothing was measured."""
        return 0.0 if self.measured is None else self.measured - self.predicted


class MeasuredSpan(NamedTuple):
    """A part of a measured step, in seconds from the begin of its forward.

    A transfer of a trace without a device lasts from its issue to the end of its wait, at most.
    """

    on_compute: bool
    kind: str
    """One of `colours.TIMES`: the phase of compute, the op of a transfer, or a wait."""
    start: float
    seconds: float


@dataclass(frozen=True)
class TraceComparison:
    """An estimate of a step beside the steps of a trace.

    steps: how many were measured. measured_seconds: of forward and backward together, the median.
    others: forwards and backwards in the trace that are of another program. last_step: what the
    last whole step did.
    """

    estimate: Estimate
    run: MeasuredRun
    events: tuple[ComparedEvent, ...]
    steps: int
    measured_seconds: float
    others: int
    last_step: tuple[MeasuredSpan, ...]

    @property
    def predicted_seconds(self) -> float:
        """Forward and backward, without the optimizer."""
        return self.estimate.timeline.seconds

    def sums(self, kind: str, unit: str | None = None) -> tuple[float, float]:
        """(measured, predicted) seconds of all events of `kind`, or of those of one unit."""
        of_kind = [
            e for e in self.events if e.kind == kind and (unit is None or e.event.unit == unit)
        ]
        return sum(e.measured or 0.0 for e in of_kind), sum(e.predicted for e in of_kind)

    def _sums(self, unit: str | None = None) -> dict[str, dict[str, float]]:
        kinds = (ON_COMPUTE, EXPOSED, COMMUNICATION)
        sides = ("measured", "predicted")
        return {k: dict(zip(sides, self.sums(k, unit), strict=True)) for k in kinds}

    @cached_property
    def largest(self) -> Sequence[ComparedEvent]:
        """The events whose measured time is furthest from the predicted one, these first."""
        measured = [e for e in self.events if e.measured is not None and e.kind != OTHER]
        return sorted(measured, key=lambda e: -abs(e.difference))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data, ready for JSON; times in seconds."""
        return {
            "steps": self.steps,
            "rank": self.run.rank,
            "on_device": self.run.on_device,
            "measured_seconds": self.measured_seconds,
            "predicted_seconds": self.predicted_seconds,
            "sums": self._sums(),
            "units": {unit.fqn: self._sums(unit.fqn) for unit in self.estimate.plan.units},
            "events": [
                {
                    "name": e.event.name,
                    "node": e.node,
                    "kind": e.kind,
                    "predicted": e.predicted,
                    "measured": e.measured,
                    "host": e.host,
                }
                for e in self.events
            ],
        }

    def text(self, *, every_event: bool = False) -> str:
        """The sums, the units and the largest differences; with `every_event` a line for each."""
        return "\n".join(_text(self, every_event))

    def __str__(self) -> str:
        return self.text()


def compare_trace(estimate: Estimate, path: Path) -> TraceComparison:
    """Set the steps in a trace beside the `estimate` of the program that was traced."""
    run = read_trace(path)
    program = estimate.program
    timeline = list(program.timeline())
    by_phase = {
        phase: [place for place, (event, _) in enumerate(timeline) if event.phase == phase]
        for phase in (FORWARD, BACKWARD)
    }
    collectives = _collectives(timeline)
    measured: dict[int, list[tuple[float | None, float]]] = defaultdict(list)
    lengths: dict[str, list[float]] = {FORWARD: [], BACKWARD: []}
    matched: list[tuple[Half, dict[int, MeasuredEvent]]] = []
    for half in run.halves:
        places = by_phase[half.phase]
        found = _matched([timeline[place][0] for place in places], half)
        if found is None:
            continue
        by_place = {places[index]: event for index, event in found.items()}
        lengths[half.phase].append(_seconds(half, run.on_device))
        matched.append((half, by_place))
        for place in places:
            one = by_place.get(place)
            took = _measured(place, timeline, by_place, collectives, on_device=run.on_device)
            measured[place].append((took, one.end - one.begin if one else 0.0))
    phases = [phase for phase in (FORWARD, BACKWARD) if by_phase[phase]]
    if not all(lengths[phase] for phase in phases):
        missing = next(phase for phase in phases if not lengths[phase])
        raise CostError(_difference(run, missing, [timeline[p][0] for p in by_phase[missing]]))
    predicted = predicted_seconds(estimate, timeline)
    events = []
    for place, (event, nodes) in enumerate(timeline):
        seconds = [s for s, _ in measured[place] if s is not None]
        events.append(
            ComparedEvent(
                event,
                nodes[0].name,
                _kind(event),
                predicted[place],
                median(seconds) if seconds else None,
                median(host for _, host in measured[place]),
            )
        )
    return TraceComparison(
        estimate,
        run,
        tuple(events),
        min(len(lengths[phase]) for phase in phases),
        sum(median(lengths[phase]) for phase in phases),
        len(run.halves) - sum(map(len, lengths.values())),
        tuple(_last_step(matched, timeline, collectives)),
    )


def _kind(event: Event) -> str:
    op = next((op for op in ops.OPS.values() if op.name == event.op), None)
    if op is None:
        return ON_COMPUTE
    if op.target in (ops.wait, ops.arrive):
        return EXPOSED
    if op.kind in (ops.Kind.COLLECTIVE, ops.Kind.COPY):
        return COMMUNICATION
    return OTHER if op.kind is ops.Kind.FREE else ON_COMPUTE


# -- predicted ------------------------------------------------------------------------------------


def predicted_seconds(
    estimate: Estimate, timeline: Sequence[tuple[Event, list[Any]]]
) -> list[float]:
    """Predicted seconds of each event of `Program.timeline`, in its order.

    They are those on the event's stream, or of a wait those for which compute stands still.
    """
    place_of = {node: place for place, node in enumerate(estimate.program.graph.nodes)}
    at = estimate.timeline.at
    on_stream = {t.span.place: t.span.seconds for t in estimate.transfers}
    seconds = []
    for event, nodes in timeline:
        places = [place_of[node] for node in nodes]
        if _kind(event) == COMMUNICATION:
            seconds.append(sum(on_stream.get(place, 0.0) for place in places))
        else:
            seconds.append(sum(at[place] - (at[place - 1] if place else 0.0) for place in places))
    return seconds


# -- measured -------------------------------------------------------------------------------------


def _matched(expected: Sequence[Event], half: Half) -> dict[int, MeasuredEvent] | None:
    """The measured event by the place of each expected one; None if the half is of another program.

    Compute that only picks results of operators has no range where these ran in the other half.
    """
    names = [event.name for event in expected]
    known = set(names)
    found: dict[int, MeasuredEvent] = {}
    place = 0
    for event in half.events:
        if event.name not in known:
            if is_compute(event.name):
                continue
            return None
        while place < len(names) and names[place] != event.name and is_compute(names[place]):
            place += 1
        if place < len(names) and names[place] == event.name:
            found[place] = event
            place += 1
        elif not is_compute(event.name):
            return None
    return found if all(map(is_compute, names[place:])) else None


def is_compute(name: str) -> bool:
    """Whether a range of this name is around compute of a unit."""
    return f" {COMPUTE} " in name


def _collectives(timeline: Sequence[tuple[Event, list[Any]]]) -> dict[int, list[int]]:
    """By the place of a wait or an arrival, the places of what it waits for."""
    by_node = {node: place for place, (_, nodes) in enumerate(timeline) for node in nodes}
    waits = {}
    for place, (_, nodes) in enumerate(timeline):
        if nodes[0].target is ops.wait:
            waits[place] = [by_node[ops.collective_of(node)] for node in nodes]
        elif nodes[0].target is ops.arrive:
            waits[place] = [by_node[node.args[0]] for node in nodes]
    return waits


def _seconds(half: Half, on_device: bool) -> float:
    kernels = [kernel for event in half.events for kernel in event.kernels]
    if on_device and kernels:
        return max(k.end for k in kernels) - min(k.begin for k in kernels)
    return half.end - half.begin


def _measured(
    place: int,
    timeline: Sequence[tuple[Event, list[Any]]],
    by_place: Mapping[int, MeasuredEvent],
    collectives: Mapping[int, list[int]],
    *,
    on_device: bool,
) -> float | None:
    """Seconds of one event of a half; None where the trace does not show them."""
    event, kind = by_place.get(place), _kind(timeline[place][0])
    if not on_device:
        if kind == COMMUNICATION:
            return None
        return event.end - event.begin if event is not None else 0.0
    if kind == EXPOSED:
        return _exposed(place, by_place, collectives[place])
    return sum(k.end - k.begin for k in event.kernels) if event is not None else 0.0


def _exposed(place: int, by_place: Mapping[int, MeasuredEvent], awaited: Sequence[int]) -> float:
    """Seconds for which the compute stream stands still at a wait while what it waits for runs."""
    running = [k for a in awaited if a in by_place for k in by_place[a].kernels]
    seconds: dict[str, float] = defaultdict(float)
    for event in by_place.values():
        if is_compute(event.name):
            for kernel in event.kernels:
                seconds[kernel.stream] += kernel.end - kernel.begin
    stream = max(seconds, key=seconds.__getitem__, default="")
    running = [k for k in running if k.stream != stream]
    if not running:
        return 0.0
    compute = [(p, k) for p, e in by_place.items() for k in e.kernels if k.stream == stream]
    begin = max((k.end for p, k in compute if p < place), default=running[0].begin)
    end = min((k.begin for p, k in compute if p >= place), default=running[-1].end)
    return sum(max(0.0, min(end, k.end) - max(begin, k.begin)) for k in running)


def _last_step(
    matched: Sequence[tuple[Half, Mapping[int, MeasuredEvent]]],
    timeline: Sequence[tuple[Event, list[Any]]],
    collectives: Mapping[int, list[int]],
) -> Iterator[MeasuredSpan]:
    """What the last forward and backward did that follow each other, or the last of either."""
    steps = [pair for pair in pairwise(matched) if pair[0][0].phase == FORWARD != pair[1][0].phase]
    halves = steps[-1] if steps else matched[-1:]
    begin = halves[0][0].begin
    events = {p: event for _, half in halves for p, event in half.items()}
    on_device = any(event.kernels for event in events.values())
    for place, measured in events.items():
        event, kind = timeline[place][0], _kind(timeline[place][0])
        for kernel in measured.kernels:
            if kind in (ON_COMPUTE, COMMUNICATION):
                name = event.phase if kind == ON_COMPUTE else event.op
                seconds = kernel.end - kernel.begin
                yield MeasuredSpan(kind == ON_COMPUTE, name, kernel.begin - begin, seconds)
        if on_device:
            continue
        start, seconds = measured.begin - begin, measured.end - measured.begin
        if kind == ON_COMPUTE:
            yield MeasuredSpan(True, event.phase, start, seconds)
        elif kind == EXPOSED:
            yield MeasuredSpan(True, WAIT, start, seconds)
            for issued in collectives[place]:
                at = events[issued].begin if issued in events else measured.begin
                op = timeline[issued][0].op
                yield MeasuredSpan(False, op, at - begin, measured.end - at)


def _difference(run: MeasuredRun, phase: str, expected: Sequence[Event]) -> str:
    """The message for a trace that shows no `phase` with the `expected` events."""
    half = next((half for half in run.halves if half.phase == phase), None)
    if half is None:
        return f"{run.path} shows no whole {phase}, and the program has one; trace whole steps"
    mine = [event.name for event in expected if event.op != COMPUTE]
    theirs = [event.name for event in half.events if not is_compute(event.name)]
    number = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
        min(len(mine), len(theirs)),
    )
    a, b = (names[number] if number < len(names) else "nothing more" for names in (mine, theirs))
    return (
        f"{run.path} is of another program: its {phase} differs first at event {number + 1} "
        f"(compute not counted), which is {b!r} in the trace and {a!r} in the program; give the "
        "model, policy, inputs and number of ranks that were traced"
    )


# -- text -----------------------------------------------------------------------------------------

_LARGEST = 8


def _text(comparison: TraceComparison, every_event: bool) -> Iterator[str]:
    run = comparison.run
    steps = f"{comparison.steps} step" + ("" if comparison.steps == 1 else "s")
    rank = "" if run.rank is None else f" of rank {run.rank}"
    where = "kernels on the device" if run.on_device else "the host's time, no device"
    yield f"{steps}{rank} in {run.path.name} ({where}), beside {comparison.estimate.hardware}"
    if comparison.others:
        yield f"{comparison.others} forwards and backwards in the trace are of other programs"
    yield ""
    rows = [("forward and backward", comparison.measured_seconds, comparison.predicted_seconds)]
    rows += [
        (name, *comparison.sums(kind))
        for name, kind in (("compute", ON_COMPUTE), ("exposed communication", EXPOSED))
    ]
    if run.on_device:
        rows.append(("all communication", *comparison.sums(COMMUNICATION)))
    else:
        issuing = sum(e.host for e in comparison.events if e.kind == COMMUNICATION)
        predicted = rows[0][2] - rows[1][2] - rows[2][2]
        rows.append(("issuing communication", issuing, max(0.0, predicted)))
    rest = rows[0][1] - rows[1][1] - rows[2][1] - (0.0 if run.on_device else rows[3][1])
    rows.append(("the rest (late host, frees)", max(0.0, rest), 0.0))
    yield from table(
        ("sum of a step", "measured", "predicted", "difference"),
        [(name, *_cells(m, p)) for name, m, p in rows],
    )
    yield ""
    units = []
    for unit in comparison.estimate.plan.units:
        compute, exposed = (comparison.sums(kind, unit.fqn) for kind in (ON_COMPUTE, EXPOSED))
        units.append((unit.fqn or "(root)", *_cells(*compute), *_cells(*exposed)))
    heading = ("unit", "compute", "predicted", "difference", "exposed", "predicted", "difference")
    yield from table(heading, units)
    yield ""
    title = "event" if every_event else "largest differences"
    shown = comparison.events if every_event else comparison.largest[:_LARGEST]
    yield from table(
        (title, "measured", "predicted", "difference"),
        [(e.event.name, *_cells(e.measured, e.predicted)) for e in shown],
    )


def _cells(measured: float | None, predicted: float) -> tuple[str, str, str]:
    if measured is None:
        return "-", human_seconds(predicted), "-"
    difference = measured - predicted
    sign = "-" if difference < 0 else "+"
    return (
        human_seconds(measured),
        human_seconds(predicted),
        f"{sign}{human_seconds(abs(difference))}",
    )
