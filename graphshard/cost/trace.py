"""Write an estimate as a trace: one row per stream, and a counter of live memory by category.

The format is Chrome's "Trace Event Format", for Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphshard.cost.estimate import Estimate

_MICROSECONDS = 1e6  # in a second


def write_trace(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Write the events of `estimate` as JSON."""
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(estimate))}
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def _events(estimate: Estimate) -> Iterator[dict[str, Any]]:
    timeline = estimate.timeline
    streams = {span.stream: None for span in timeline.spans}
    numbers = {name: number for number, name in enumerate(streams)}
    yield _name_event("process_name", f"predicted step on {estimate.hardware.name}", 0)
    for name, number in numbers.items():
        yield _name_event("thread_name", name, number)
    details = {transfer.span: transfer for transfer in timeline.transfers}
    for span in timeline.spans:
        transfer = details.get(span)
        args: dict[str, Any] = {"unit": span.unit or "(root)", "phase": span.phase}
        if transfer is not None:
            args |= {
                "bytes": transfer.bytes,
                "ranks": transfer.ranks,
                "exposed_us": transfer.exposed * _MICROSECONDS,
                "reason": estimate.why(transfer),
            }
        yield {
            "name": f"{span.name} {span.unit or '(root)'}",
            "cat": span.phase,
            "ph": "X",
            "pid": 0,
            "tid": numbers[span.stream],
            "ts": span.start * _MICROSECONDS,
            "dur": span.seconds * _MICROSECONDS,
            "args": args,
        }
    for at, by_category in memory_steps(estimate):
        counts = {name: size for name, size in by_category.items() if size}
        yield {"name": "live bytes", "ph": "C", "pid": 0, "ts": at * _MICROSECONDS, "args": counts}


def memory_steps(estimate: Estimate) -> Iterator[tuple[float, dict[str, int]]]:
    """The times in seconds at which live bytes change, with the new bytes by category."""
    at = estimate.timeline.at
    for point in estimate.memory.points:
        seconds = at[point.place] if point.place < len(at) else estimate.timeline.seconds
        yield seconds, dict(point.by_category)


def _name_event(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
