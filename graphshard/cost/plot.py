"""Draw an estimate: streams over time, and below them live memory by category."""

from __future__ import annotations

import os
from typing import Any

from graphshard.cost.colours import FAR, MEMORY, TIMES, Fill, stream_meaning
from graphshard.cost.details import memory_steps
from graphshard.cost.estimate import Estimate
from graphshard.cost.streams import COMPUTE
from graphshard.cost.text import range_text
from graphshard.cost.timeline import Span
from graphshard.errors import CostError
from graphshard.format import human_bytes, human_seconds

_MIN_SHARE = 0.001  # a category is drawn if it reaches this fraction of the peak


def draw(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Draw `estimate` into a file whose suffix names its format (svg, png, pdf)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CostError(
            "plotting an estimate needs matplotlib; install graphshard[plot], or save_trace(...)"
        ) from None
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    scale, unit = (1.0, "s") if estimate.step_seconds >= 1 else (1e3, "ms")
    _draw_streams(streams, estimate, scale)
    _draw_memory(memory, estimate, scale)
    named = dict.fromkeys(s.stream for s in estimate.timeline.spans if s.stream != COMPUTE)
    meanings = [f"{name}: {stream_meaning(name)}" for name in named]
    memory.set_xlabel("\n".join([unit, *meanings]))
    memory.set_xlim(0, estimate.step_seconds * scale)
    figure.suptitle(
        f"{estimate.plan.units[0].module_class} on "
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
        label, fill = entry, TIMES.get(entry, TIMES["other"])
        for place in range(len(names)):
            row = [(start * scale, long * scale) for start, long, at in bars if at == place]
            if row:
                drawn = axes.broken_barh(row, (place - 0.4, 0.8), label=label)
                _paint(drawn, fill)
                label = "_"  # one entry in the legend
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_memory(axes: Any, estimate: Estimate, scale: float) -> None:
    steps = list(memory_steps(estimate))
    steps.append((estimate.step_seconds, dict(estimate.memory.valley_by_category)))
    most = {name: max(live.get(name, 0) for _, live in steps) for name in MEMORY}
    names = [name for name in MEMORY if most[name] > _MIN_SHARE * estimate.peak_bytes]
    times = [at * scale for at, _ in steps]
    layers = [[live.get(name, 0) / 2**30 for _, live in steps] for name in names]
    for name, layer in zip(
        names, axes.stackplot(times, layers, labels=names, step="post"), strict=True
    ):
        _paint(layer, MEMORY[name])
    peak = estimate.peak_bytes / 2**30
    spare = estimate.hardware.memory_bytes - estimate.device_bytes
    room = peak + spare / 2**30
    near = room <= FAR * peak
    top = 1.15 * max(peak, room if near else 0)
    axes.set_ylim(0, top)
    lines = [(peak, f"peak {human_bytes(estimate.peak_bytes)}", "right")]
    device = human_bytes(estimate.hardware.memory_bytes)
    text = f"{human_bytes(estimate.peak_bytes + spare)} for tensors, of the device's {device}"
    if near:
        lines.append((room, text, "left"))
    for height, label, side in lines:
        axes.axhline(height, color="black", linewidth=0.8, linestyle="--")
        at = estimate.step_seconds * scale if side == "right" else 0
        axes.annotate(label, (at, height), (0, 3), textcoords="offset points", ha=side)
    if not near:
        axes.annotate(f"\u2191 {text}", (0, top), (4, -4), textcoords="offset points", va="top")
    axes.set_ylabel("GiB alive")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _paint(area: Any, fill: Fill) -> None:
    area.set(facecolor=fill.colour, edgecolor="white", linewidth=0.2)
    if fill.hatch:
        area.set(hatch=3 * fill.hatch, edgecolor="#22222299", linewidth=0)
