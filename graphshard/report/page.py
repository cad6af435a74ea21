"""The page: one HTML file with its data, its figures and the library that draws them.

The data is `Estimate.to_dict(details=True)`; whatever the page shows is derived from it, by
`verdict`, by the layout of the treemap, and by page.js. Data and library are compressed, and the
page unpacks them.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from graphshard.cost.against_trace import compare_trace
from graphshard.errors import CostError
from graphshard.report.colours import CLASSES, MEMORY, SPANS
from graphshard.report.treemap import tiles
from graphshard.report.verdict import verdict
from graphshard.report.what_if import what_if_dict

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate
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
        "colours": {"spans": SPANS, "memory": MEMORY, "classes": CLASSES},
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
    model = data["plan"]["model"] or "a program"
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
    """By what areas stand for, the tiles of all units: left, right, bottom, top."""
    return {
        name: [[round(edge, 6) for edge in tile] for tile in tiles([u[key] for u in units], *size)]
        for name, key in _AREAS.items()
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
