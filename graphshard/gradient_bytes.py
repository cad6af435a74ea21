"""What gradients cost a rank, reduced with each backward or kept for a later one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from graphshard.plan import ParamLayout, ShardingPlan, Unit


@dataclass(frozen=True)
class GradientBytes:
    """Bytes a rank holds between the backwards of one step, for the parameters that are trained.

    reduced: `.grad` of every parameter, padding included, where each backward reduces.
    kept: whole gradients, where backwards inside `no_sync()` keep them.
    """

    reduced: int
    kept: int


def gradient_bytes(plan: ShardingPlan) -> GradientBytes:
    """The bytes of `plan`; gradients of ignored parameters are held whole either way."""
    trained = [(u, layout) for u in plan.units for layout in u.layouts if layout.requires_grad]
    own = sum(layout.full_bytes for layout in plan.ignored if layout.requires_grad)
    return GradientBytes(
        reduced=own
        + sum(prod(layout.shard_shape) * _stored(u, layout).itemsize for u, layout in trained),
        kept=own + sum(layout.numel * _reduced(u, layout).itemsize for u, layout in trained),
    )


def _reduced(unit: Unit, layout: ParamLayout) -> torch.dtype:
    """The dtype a gradient is reduced, and so kept, in."""
    precision = unit.options.precision
    if precision is None or not layout.dtype.is_floating_point:
        return layout.dtype
    return precision.reduce_dtype or precision.param_dtype or layout.dtype


def _stored(unit: Unit, layout: ParamLayout) -> torch.dtype:
    precision = unit.options.precision
    keeps = precision is not None and precision.keep_low_precision_grads
    return _reduced(unit, layout) if keeps else layout.dtype
