"""How much longer operators take within real steps than predicted, from a trace of such steps."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any

from graphshard.cost.against_trace import is_compute, predicted_seconds
from graphshard.cost.estimate import Estimate
from graphshard.cost.measured import Half, MeasuredRun, read_trace
from graphshard.errors import CostError
from graphshard.format import human_seconds, some_of
from graphshard.hardware.hardware import Hardware
from graphshard.program.program import BACKWARD, FORWARD


@dataclass(frozen=True)
class LikeTrace:
    """An estimate for hardware whose operators take as long as they did in a trace.

    factor: `Hardware.in_step` of the new hardware over that of the old. measured, predicted:
    seconds of compute in forward and backward, in the trace (the median over its steps) and by the
    old estimate. steps: how many the trace shows. before, estimate: the old estimate and the new.
    """

    path: Path
    factor: float
    measured: float
    predicted: float
    steps: int
    before: Estimate
    estimate: Estimate

    def to_dict(self) -> dict[str, Any]:
        """The factor and what it is of, as plain data; times in seconds."""
        return {
            "trace": self.path.name,
            "factor": self.factor,
            "measured_compute_seconds": self.measured,
            "predicted_compute_seconds": self.predicted,
            "steps": self.steps,
            "doubt": self.doubt,
            "step_seconds_before": self.before.step_seconds,
            "step_seconds": self.estimate.step_seconds,
        }

    @property
    def doubt(self) -> str:
        """Why the factor may be of other things than operators; "" for a usual one."""
        if _LEAST_USUAL <= self.factor <= _MOST_USUAL:
            return ""
        return (
            f"a factor outside {_LEAST_USUAL:g} to {_MOST_USUAL:g} is seldom of operators alone: "
            "see whether the traced run had the same inputs per rank, recompute, dtypes and "
            "hardware, and a machine that was not busy with others"
        )

    def __str__(self) -> str:
        """What was measured, what it changes, and whether to doubt it."""
        doubt = f"; {self.doubt}" if self.doubt else ""
        steps = f"{self.steps} step" + ("" if self.steps == 1 else "s")
        return (
            f"operators take {self.factor:.3f} times as long as predicted: in {steps} of "
            f"{self.path.name} compute takes {human_seconds(self.measured)}, predicted were "
            f"{human_seconds(self.predicted)}; the step of "
            f"{human_seconds(self.before.step_seconds)} becomes one of "
            f"{human_seconds(self.estimate.step_seconds)}{doubt}"
        )


_LEAST_USUAL, _MOST_USUAL = 0.5, 3.0


def like_trace(estimate: Estimate, path: str | os.PathLike[str]) -> LikeTrace:
    """Estimate the step of `estimate` anew, with operators as long as in a trace.

    What is left of the error of compute is about that of two predictions on one machine, so the new
    hardware expects compute within `pair_spread` of the prediction; and the rest of the step, of
    which the trace says nothing, within the `spread` it had.

    Compute is compared unit by unit, so the traced run may have another number of ranks, strategy
    or schedule. Its model, its inputs per rank, its units and what it recomputes must be the same.

    Args:
        estimate: of the step to predict, on the hardware that was traced.
        path: what `prof.export_chrome_trace` or `tensorboard_trace_handler` wrote, also gzipped.

    Raises:
        CostError: the file is no such trace, its units are others, or it is of a CPU and the
            hardware is a GPU, or the other way round.
    """
    path = Path(path)
    run = read_trace(path)
    _check_device(run, estimate.hardware)
    predicted = _predicted(estimate)
    measured, steps = 0.0, []
    for phase in (FORWARD, BACKWARD):
        names = {name for name in predicted if name.endswith(f" {phase}")}
        if not names:
            continue
        halves = [_by_name(half, run) for half in run.halves if half.phase == phase]
        needed = {name for name in names if predicted[name]}
        same = [half for half in halves if needed <= half.keys() <= names]
        if not same:
            raise CostError(_difference(path, phase, names, needed, halves))
        measured += median(fsum(half.values()) for half in same)
        steps.append(len(same))
    before = now = fsum(predicted.values())
    if not steps or not before:
        raise CostError("the program computes nothing, so a trace says nothing of its operators")
    old = estimate.hardware
    source = f"{old.source}; time of operators within a step: {path.name}"
    factor, like = 1.0, estimate
    for _ in range(_MOST_ROUNDS):
        factor *= measured / now
        like = estimate.with_hardware(old.with_(in_step=old.in_step * factor, source=source))
        now = fsum(_predicted(like).values())
        if abs(now - measured) <= _EXACT * measured:
            break
    spread = _spread(old, now / like.step_seconds)
    like = replace(like, hardware=like.hardware.with_(spread=spread))
    return LikeTrace(path, factor, measured, before, min(steps), estimate, like)


def _spread(hardware: Hardware, share: float) -> tuple[float, float]:
    """The spread of a step of which this share is compute as long as in a trace."""
    low, high = hardware.spread
    if low == high:  # a machine without errors
        return low, high
    pair = 1 + hardware.pair_spread
    return share / pair + (1 - share) * low, share * pair + (1 - share) * high


def _check_device(run: MeasuredRun, hardware: Hardware) -> None:
    """Raise CostError if `run` is not of the kind of device that `hardware` describes."""
    if run.on_device != hardware.is_host:
        return
    shows, kind = ("kernels", "CPU") if run.on_device else ("no kernels", "GPU")
    raise CostError(
        f"{run.path} shows {shows} of a device, and {hardware.name} is a {kind}; pass a trace of "
        "the hardware to predict, with ProfilerActivity.CUDA among the activities on GPUs, or the "
        "hardware that was traced"
    )


_MOST_ROUNDS, _EXACT = 8, 1e-4
"""A search, as what collectives take from operators beside them does not grow with `in_step`."""


def _predicted(estimate: Estimate) -> dict[str, float]:
    """Predicted seconds of compute by the name of its range."""
    seconds: dict[str, float] = defaultdict(float)
    timeline = list(estimate.program.timeline())
    for (event, _), took in zip(timeline, predicted_seconds(estimate, timeline), strict=True):
        if is_compute(event.name):
            seconds[event.name] += took
    return seconds


def _by_name(half: Half, run: MeasuredRun) -> dict[str, float]:
    """Seconds of compute by the name of its range: kernels, or the host's time without a device."""
    seconds: dict[str, float] = defaultdict(float)
    for event in half.events:
        if is_compute(event.name):
            kernels = (kernel.end - kernel.begin for kernel in event.kernels)
            seconds[event.name] += fsum(kernels) if run.on_device else event.end - event.begin
    return {name: time for name, time in seconds.items() if time}


def _difference(
    path: Path, phase: str, names: set[str], needed: set[str], halves: list[dict[str, float]]
) -> str:
    """The message for a trace in which no `phase` has compute of the same units."""
    if not halves:
        return f"{path} shows no whole {phase}, and the program has one; trace whole steps"
    missing, more = needed - halves[0].keys(), halves[0].keys() - names
    parts = [f"it has no {some_of(sorted(missing))}"] if missing else []
    parts += [f"the program has no {some_of(sorted(more))}"] if more else []
    return (
        f"{path} is of other units: {' and '.join(parts)}; give the model, the inputs and the "
        "policy's units that were traced"
    )
