"""The page: one HTML file with its data, its figures and the library that draws them.

The data is `Estimate.to_dict(details=True)`; whatever the page shows is derived from it, by
`verdict`, by the layout of the treemap, and by page.js.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from graphshard.cost.against_trace import compare_trace
from graphshard.cost.colours import FAR, MEMORY, TIMES, UNITS, UNKNOWN, stream_meaning
from graphshard.cost.compare import compare
from graphshard.cost.estimate import Estimate
from graphshard.errors import CostError
from graphshard.format import human_seconds

if TYPE_CHECKING:
    from graphshard.tune.tuning import Tuning

_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_AREAS = {"gathered": "unsharded", "sharded": "sharded", "padding": "padding"}
"""What the areas of the treemap can stand for, and the key of a unit's bytes in the plan."""


def write_report(
    estimate: Estimate,
    path: str | os.PathLike[str],
    *,
    what_if: Mapping[str, Estimate] | None = None,
    tuning: Tuning | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> None:
    """See `Estimate.report`."""
    Path(path).write_text(
        page(estimate, what_if=what_if, tuning=tuning, trace=trace), encoding="utf-8"
    )


def page(
    estimate: Estimate,
    *,
    what_if: Mapping[str, Estimate] | None = None,
    tuning: Tuning | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> str:
    """The text of the page; the same arguments give the same text."""
    try:
        from bokeh.resources import Resources

        from graphshard.report import figures
    except ImportError:
        raise CostError(
            "a report needs bokeh to draw it; install graphshard[report], or print the estimate"
        ) from None
    data = estimate.to_dict(details=True)
    comparison = None if trace is None else compare_trace(estimate, Path(trace))
    points = what_if_dict(estimate, what_if, tuning)
    time_unit = _unit(_TIMES, data["step_seconds"])
    memory_unit = _unit(_SIZES, data["peak_bytes"])
    layers = sorted(data["memory"]["bytes"], key=_layer)
    streams = list(dict.fromkeys(["compute", *data["spans"]["stream"]]))
    payload = {
        "estimate": data,
        "what_if": points,
        "trace": None if comparison is None else comparison.to_dict(),
        "treemap": _treemap(data["plan"]["units"], figures.TREEMAP_SIZE),
        "layers": layers,
        "units": {
            "time": [time_unit, _TIMES[time_unit]],
            "memory": [memory_unit, _SIZES[memory_unit]],
        },
        "fills": {"times": TIMES, "memory": MEMORY, "units": UNITS, "unknown": UNKNOWN},
        "streams": {stream: stream_meaning(stream) for stream in streams},
        "far": FAR,
        "figures": figures.figures(
            streams,
            layers,
            seconds=data["step_seconds"] / _TIMES[time_unit],
            time_unit=time_unit,
            memory_unit=memory_unit,
            measured=comparison is not None,
            what_if=points is not None,
        ),
    }
    model = data["plan"]["model"]
    texts = {"The estimate": str(estimate), "The plan": str(estimate.plan)}
    if comparison is not None:
        texts["Measured beside predicted"] = str(comparison)
    return Template(_asset("page.html")).substitute(
        title=escape(f"{model} on {data['plan']['world_size']:,} ranks"),
        subtitle=escape(f"{estimate.hardware}; policy {estimate.plan.policy!r}"),
        verdict=verdict(data),
        what_if_hidden="" if points else "hidden",
        trace_hidden="" if comparison else "hidden",
        text="\n".join(f"<h3>{k}</h3>\n<pre>{escape(v)}</pre>" for k, v in texts.items()),
        style=_asset("page.css"),
        library=_packed("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        data=_packed(json.dumps(payload, separators=(",", ":"), allow_nan=False)),
        script=_asset("page.js"),
    )


def _treemap(units: list[dict[str, Any]], size: tuple[float, float]) -> dict[str, Any]:
    """The numbers of equal units, and by what areas stand for their tiles: left to top."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, unit in enumerate(units):
        alike = unit["module_class"], *(unit[key] for key in _AREAS.values())
        groups.setdefault(alike, []).append(number)
    numbers = list(groups.values())
    sizes = {
        name: [sum(units[number][key] for number in group) for group in numbers]
        for name, key in _AREAS.items()
    }
    return {
        "areas": _AREAS,
        "groups": numbers,
        "tiles": {
            name: [[round(edge, 6) for edge in tile] for tile in tiles(of, *size)]
            for name, of in sizes.items()
        },
    }


def _layer(category: str) -> int:
    """The place of a category in the stack: the longest-lived at the bottom, new ones on top."""
    return list(MEMORY).index(category) if category in MEMORY else len(MEMORY)


def _unit(units: Mapping[str, float], value: float) -> str:
    """The largest unit that `value` reaches, or the smallest there is."""
    return next((name for name, size in units.items() if value >= size), list(units)[-1])


def _asset(name: str) -> str:
    return files("graphshard.report").joinpath(name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    """Compressed, as text that needs no escapes in HTML; the same bytes in each run."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


_REASONS = 3


def verdict(estimate: dict[str, Any]) -> str:
    """The verdict on `Estimate.to_dict(details=True)` as HTML; links name places of the program."""
    capacity, tensors = estimate["hardware"]["memory_bytes"], estimate["peak_bytes"]
    unit = _unit(_SIZES, capacity)
    if tensors < 0.01 * _SIZES[unit]:
        unit = _unit(_SIZES, tensors)
    digits = 2 if _SIZES[unit] > 1 else 0
    of, at_most, left = (
        round(size / _SIZES[unit], digits)
        for size in (capacity, tensors, capacity - estimate["device_bytes"])
    )
    beside = of - at_most - left  # of rounded figures, so that those shown add up

    def shown(number: float) -> str:
        return f"{number:,.{digits}f} {unit}"

    fits = f"{'Fits' if estimate['fits'] else 'Does not fit'} in {shown(of)}"
    over = f"{shown(left)} to spare" if left >= 0 else f"{shown(-left)} too much"
    more = f" and {shown(beside)} beside them (allocator, CUDA, NCCL, driver)"
    more = more if estimate["device_bytes"] > tensors else ""
    memory = estimate["memory"]
    at_peak = memory["place"][memory["peak"]]
    peak = _link(at_peak, f"{shown(at_most)} of tensors at the peak")
    step = estimate["step_seconds"]
    share = estimate["exposed_seconds"] / step if step else 0.0
    low, high = map(human_seconds, estimate["step_range"])
    expected = f" ({low} to {high} expected)" if low != high else ""
    sentences = [
        f'<strong class="{"good" if estimate["fits"] else "bad"}">{fits}</strong>: '
        f"{peak}{more}, {over}.",
        f"A step takes <strong>{human_seconds(step)}</strong>{expected} at "
        f"<strong>{estimate['mfu']:.1%}</strong> of the device's peak (MFU), of which "
        f"<strong>{human_seconds(estimate['exposed_seconds'])}</strong> ({share:.1%}) are exposed "
        "communication.",
    ]
    causes = estimate["causes"][:_REASONS]
    if not causes:
        return f"<p>{' '.join([*sentences, 'Compute waits for nothing.'])}</p>"
    return f"<p>{' '.join(sentences)}</p>\n<ol>{''.join(_cause(c, estimate) for c in causes)}</ol>"


def _cause(cause: dict[str, Any], estimate: dict[str, Any]) -> str:
    worst = estimate["transfers"][cause["worst_transfer"]]
    unit = worst["unit"] or "(root)"
    more = f" and {cause['count'] - 1} more" if cause["count"] > 1 else ""
    what = _link(worst["place"], f"{cause['op']} of {unit}")
    return (
        f"<li><strong>{human_seconds(cause['seconds'])}</strong>: {what}{more} in "
        f"{cause['phase']}: {escape(cause['text'])}</li>"
    )


def _link(place: int, text: str) -> str:
    return f'<a href="#place-{place}" data-place="{place}">{escape(text)}</a>'


THIS = "this policy"


def what_if_dict(
    estimate: Estimate, others: Mapping[str, Estimate] | None, tuning: Tuning | None
) -> dict[str, Any] | None:
    """The points and comparisons as plain data; None if there is nothing but `estimate`.

    points: those with an estimate first. pairs: the text of `graphshard.compare` by the numbers of
    two points, as "0,1".
    """
    if not others and tuning is None:
        return None
    if THIS in (others or {}):
        raise CostError(f"{THIS!r} is the report's own name for its estimate; choose another one")
    estimates = {THIS: estimate, **(others or {})}
    compared = {repr(e.plan.policy) for e in estimates.values()}
    if tuning is not None and tuning.code not in compared:
        estimates["chosen by the search"] = tuning.estimate
        compared.add(tuning.code)
    points = [_point(name, e) for name, e in estimates.items()]
    for result in () if tuning is None else tuning.tried:
        if repr(result.policy) not in compared:
            points.append({"name": "", "estimated": False, **result.to_dict()})
    pairs = {
        f"{a},{b}": str(compare(one, other, names=(first, second)))
        for (a, (first, one)), (b, (second, other)) in combinations(enumerate(estimates.items()), 2)
    }
    return {"points": points, "pairs": pairs}


def _point(name: str, estimate: Estimate) -> dict[str, Any]:
    return {
        "name": name,
        "estimated": True,
        "policy": repr(estimate.plan.policy),
        "seconds": estimate.step_seconds,
        "bytes": estimate.peak_bytes,
        "whole": True,
    }


class Tile(NamedTuple):
    """A rectangle; x to the right, y upwards."""

    left: float
    right: float
    bottom: float
    top: float


def tiles(sizes: Sequence[float], width: float, height: float) -> list[Tile]:
    """Fill the rectangle `width` x `height` with one tile for each of `sizes`, in their order.

    The area of a tile is its size's share of the sum; a size of 0 gets an empty tile.
    """
    total = sum(sizes)
    if not total:
        return [Tile(0.0, 0.0, 0.0, 0.0) for _ in sizes]
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    areas = [sizes[index] * width * height / total for index in order]
    placed: dict[int, Tile] = {}
    left, bottom, right, top = 0.0, 0.0, width, height
    start = 0
    while start < len(areas) and areas[start] > 0:
        side = min(right - left, top - bottom)
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], side) <= _worst(
            areas[start:end], side
        ):
            end += 1
        row = areas[start:end]
        thick = sum(row) / side
        along = 0.0
        for index, area in zip(order[start:end], row, strict=True):
            one, other = along, along + area / thick
            if right - left >= top - bottom:
                placed[index] = Tile(left, left + thick, bottom + one, bottom + other)
            else:
                placed[index] = Tile(left + one, left + other, top - thick, top)
            along = other
        if right - left >= top - bottom:
            left += thick
        else:
            top -= thick
        start = end
    return [placed.get(index, Tile(0.0, 0.0, 0.0, 0.0)) for index in range(len(sizes))]


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of the sides of a tile, if `row` is laid along a `side`."""
    total = sum(row)
    smallest, largest = min(row), max(row)
    if not smallest:
        return float("inf")
    return max(side * side * largest / total**2, total**2 / (side * side * smallest))
