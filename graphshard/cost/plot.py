"""Draw a step: streams over time, and below them live memory by category, or measured streams."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graphshard.cost.against_trace import TraceComparison
from graphshard.cost.colours import FAR, MEMORY, TIMES, WAIT, Fill, stream_meaning
from graphshard.cost.details import memory_steps
from graphshard.cost.estimate import Estimate
from graphshard.cost.streams import COMPUTE
from graphshard.cost.text import range_text
from graphshard.errors import CostError
from graphshard.format import human_bytes, human_seconds

_MIN_SHARE = 0.001  # a category is drawn if it reaches this fraction of the peak


def draw(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Draw `estimate` into a file whose suffix names its format (svg, png, pdf)."""
    figure = _figure(6.5)
    streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    scale, unit = (1.0, "s") if estimate.step_seconds >= 1 else (1e3, "ms")
    _draw_bars(streams, list(_bars(estimate)), scale)
    _draw_memory(memory, estimate, scale)
    named = dict.fromkeys(s.stream for s in estimate.timeline.spans if s.stream != COMPUTE)
    meanings = [f"{name}: {stream_meaning(name)}" for name in named]
    memory.set_xlabel("\n".join([unit, *meanings]))
    memory.set_xlim(0, estimate.step_seconds * scale)
    figure.suptitle(
        f"{_title(estimate)}: {human_seconds(estimate.step_seconds)} a step{_expected(estimate)}, "
        f"of which {human_seconds(estimate.exposed_seconds)} wait for communication"
    )
    figure.savefig(path)


def draw_beside(comparisons: Sequence[TraceComparison], path: str | os.PathLike[str]) -> None:
    """Draw the predicted step, and below it that of each trace, by the clock of its host."""
    estimate = comparisons[0].estimate
    bars = [bar._replace(row=f"predicted: {bar.row}") for bar in _bars(estimate)]
    ranks = [comparison.run.rank for comparison in comparisons]
    for rank, comparison in zip(ranks, comparisons, strict=True):
        known = rank is not None and ranks.count(rank) == 1
        name = f"rank {rank}" if known else comparison.run.path.name
        for on_compute, kind, start, seconds in comparison.last_step:
            row = f"{name}: {COMPUTE if on_compute else kind}"
            bars.append(_Bar(row, kind, start, seconds))
    figure = _figure(1.5 + 0.5 * len({bar.row for bar in bars}))
    axes = figure.subplots()
    scale, unit = (1.0, "s") if estimate.step_seconds >= 1 else (1e3, "ms")
    _draw_bars(axes, bars, scale)
    axes.set_xlabel(unit)
    measured = ", ".join(human_seconds(c.measured_seconds) for c in comparisons)
    figure.suptitle(
        f"{_title(estimate)}: forward and backward take {measured} (medians), "
        f"predicted {human_seconds(estimate.timeline.seconds)}"
    )
    figure.savefig(path)


def _figure(inches: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CostError(
            "plotting an estimate needs matplotlib; install graphshard[plot], or save_trace(...)"
        ) from None
    return Figure(figsize=(12, inches), layout="constrained")


def _title(estimate: Estimate) -> str:
    name = estimate.plan.units[0].module_class
    return f"{name} on {estimate.plan.world_size:,} ranks of {estimate.hardware.name}"


def _expected(estimate: Estimate) -> str:
    return f" ({range_text(estimate)})" if estimate.hardware.spread != (1.0, 1.0) else ""


class _Bar(NamedTuple):
    row: str
    kind: str
    start: float
    seconds: float


def _bars(estimate: Estimate) -> Iterator[_Bar]:
    """The spans of a step, in the order of the legend: those of the compute stream are first."""
    spans = sorted(estimate.timeline.spans, key=lambda span: span.stream != COMPUTE)
    for span in spans:
        kind = span.phase if span.stream == COMPUTE else span.name
        yield _Bar(span.stream, kind, span.start, span.seconds)
    for transfer in estimate.transfers:
        if transfer.exposed:
            yield _Bar(COMPUTE, WAIT, transfer.waited_at, transfer.exposed)
    if estimate.optimizer_seconds:
        yield _Bar(COMPUTE, "optimizer", estimate.timeline.seconds, estimate.optimizer_seconds)


def _draw_bars(axes: Any, bars: Sequence[_Bar], scale: float) -> None:
    names = list(dict.fromkeys(bar.row for bar in bars))
    by_kind: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for bar in bars:
        times = by_kind.setdefault(bar.kind, {}).setdefault(bar.row, [])
        times.append((bar.start * scale, bar.seconds * scale))
    for kind, by_row in by_kind.items():
        for number, (row, times) in enumerate(by_row.items()):
            label = "_" if number else kind  # one entry in the legend
            drawn = axes.broken_barh(times, (names.index(row) - 0.4, 0.8), label=label)
            _paint(drawn, TIMES.get(kind, TIMES["other"]))
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
