"""Forwards and backwards measured by torch.profiler, read from the trace it writes.

While a profiler is on, each event of a program is a range named as `Event.name`, inside a range of
the whole forward or backward. On CUDA the kernels that an event launched are found by the ids that
tie each launch to its kernel.
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from graphshard.errors import CostError
from graphshard.plain_data import is_number
from graphshard.program.program import BACKWARD, FORWARD

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
