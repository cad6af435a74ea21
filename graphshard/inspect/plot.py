"""An estimate as a picture: streams over time, and below them live memory by category."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from graphshard.errors import CostError
from graphshard.inspect.trace import memory_steps

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate

_COLOURS = {"forward": "#4c78a8", "backward": "#f58518"}


def draw(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Draw `estimate` into a file whose ending names its format (svg, png, pdf).

    Raises:
        CostError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CostError(
            "plotting an estimate needs matplotlib; install graphshard[plot], or save_trace(...)"
        ) from None
    figure = Figure(figsize=(12, 6), layout="constrained")
    streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    _draw_streams(streams, estimate)
    _draw_memory(memory, estimate)
    figure.suptitle(
        f"{estimate.plan.units[0].module_class} on {estimate.plan.world_size:,} ranks of "
        f"{estimate.hardware.name}: {estimate.step_seconds * 1e3:,.1f} ms a step"
    )
    figure.savefig(path)


def _draw_streams(axes: Any, estimate: Estimate) -> None:
    names = list(dict.fromkeys(span.stream for span in estimate.timeline.spans))
    for row, name in enumerate(names):
        spans = [span for span in estimate.timeline.spans if span.stream == name]
        axes.broken_barh(
            [(span.start * 1e3, span.seconds * 1e3) for span in spans],
            (row - 0.4, 0.8),
            facecolors=[_COLOURS.get(span.phase, "grey") for span in spans],
            edgecolor="white",
            linewidth=0.2,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title("blue: forward, orange: backward", fontsize=9, loc="left")


def _draw_memory(axes: Any, estimate: Estimate) -> None:
    steps = list(memory_steps(estimate))
    names = list(dict.fromkeys(name for _, held in steps for name in held))
    times = [at * 1e3 for at, _ in steps]
    layers = [[held.get(name, 0) / 2**30 for _, held in steps] for name in names]
    axes.stackplot(times, layers, labels=names, step="post")
    axes.axhline(estimate.peak_bytes / 2**30, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("ms")
    axes.set_ylabel("GiB alive")
    axes.legend(loc="upper left", fontsize=8)
