"""Draw an estimate: streams over time, and below them live memory by category."""

from __future__ import annotations

import os
from typing import Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.streams import COMPUTE
from graphshard.cost.text import range_text
from graphshard.cost.timeline import Span
from graphshard.cost.trace import memory_steps
from graphshard.errors import CostError
from graphshard.format import human_bytes, human_seconds

_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "all_gather": "#54a24b",
    "reduce_scatter": "#b279a2",
    "all_reduce": "#d67195",
    "to_device": "#9d755d",
    "to_host": "#d8b5a5",
}


_EXPOSED, _OPTIMIZER, _OTHER = "#e45756", "#79706e", "#bab0ac"


# From the longest-lived category, at the bottom, to the shortest-lived.
_CATEGORIES = {
    "shards": "#2f4b7c",
    "optimizer": "#665191",
    "inputs and buffers": "#a9b4c4",
    "unsharded parameters": "#54a24b",
    "saved for backward": "#4c78a8",
    "recomputed": "#88d27a",
    "copied from the host": "#9d755d",
    "gradients to reduce": "#b279a2",
    "communication buffers": "#d67195",
    "gradients": "#f58518",
    "at work": "#eeca3b",
    "returned": "#72b7b2",
    "optimizer's step": "#79706e",
}


_MIN_SHARE = 0.001  # a category is drawn if it reaches this fraction of the peak


def draw(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Draw `estimate` into a file whose suffix names its format (svg, png, pdf)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CostError(
            "plotting an estimate needs matplotlib; install graphshard[plot], or save_trace(...)"
        ) from None
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    scale, unit = (1.0, "s") if estimate.step_seconds >= 1 else (1e3, "ms")
    _draw_streams(streams, estimate, scale)
    _draw_memory(memory, estimate, scale)
    memory.set_xlabel(unit)
    memory.set_xlim(0, estimate.step_seconds * scale)
    figure.suptitle(
        f"{estimate.plan.units[0].module_class or 'A program'} on "
        f"{estimate.plan.world_size:,} ranks of {estimate.hardware.name}: "
        f"{human_seconds(estimate.step_seconds)} a step{_expected(estimate)}, of which "
        f"{human_seconds(estimate.exposed_seconds)} wait for communication"
    )
    figure.savefig(path)


def _expected(estimate: Estimate) -> str:
    return f" ({range_text(estimate)})" if estimate.hardware.spread != (1.0, 1.0) else ""


def _kind(span: Span) -> str:
    return span.phase if span.stream == COMPUTE else span.name


def _draw_streams(axes: Any, estimate: Estimate, scale: float) -> None:
    spans = estimate.timeline.spans
    names = list(dict.fromkeys([COMPUTE, *(span.stream for span in spans)]))
    rows: dict[str, list[tuple[float, float, int]]] = {}  # by legend entry
    for span in spans:
        place = names.index(span.stream)
        rows.setdefault(_kind(span), []).append((span.start, span.seconds, place))
    rows["compute waits"] = [(t.waited_at, t.exposed, 0) for t in estimate.transfers if t.exposed]
    rows["optimizer"] = [(estimate.timeline.seconds, estimate.optimizer_seconds, 0)]
    for entry, bars in rows.items():
        colour = {"compute waits": _EXPOSED, "optimizer": _OPTIMIZER}.get(entry)
        label = entry
        for place in range(len(names)):
            row = [(start * scale, long * scale) for start, long, at in bars if at == place]
            if row:
                axes.broken_barh(
                    row,
                    (place - 0.4, 0.8),
                    facecolors=colour or _COLOURS.get(entry, _OTHER),
                    edgecolor="white",
                    linewidth=0.2,
                    label=label,
                )
                label = "_"  # one entry in the legend
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)


def _draw_memory(axes: Any, estimate: Estimate, scale: float) -> None:
    steps = list(memory_steps(estimate))
    steps.append((estimate.step_seconds, dict(estimate.memory.valley_by_category)))
    most = {name: max(live.get(name, 0) for _, live in steps) for name in _CATEGORIES}
    names = [name for name in _CATEGORIES if most[name] > _MIN_SHARE * estimate.peak_bytes]
    times = [at * scale for at, _ in steps]
    layers = [[live.get(name, 0) / 2**30 for _, live in steps] for name in names]
    colours = [_CATEGORIES[name] for name in names]
    axes.stackplot(times, layers, labels=names, colors=colours, step="post")
    peak = estimate.peak_bytes / 2**30
    axes.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {human_bytes(estimate.peak_bytes)}",
        (estimate.step_seconds * scale, peak),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.set_ylim(0, peak * 1.1)
    axes.set_ylabel("GiB alive")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize=8,
        frameon=False,
    )
