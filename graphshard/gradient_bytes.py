"""What gradients cost a rank, reduced with each backward or kept for a later one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from graphshard.plan import ShardingPlan


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
    trained = [each for unit in plan.units for each in unit.layouts if each.requires_grad]
    own = sum(layout.full_bytes for layout in plan.ignored if layout.requires_grad)
    return GradientBytes(
        reduced=own + sum(prod(each.shard_shape) * each.grad_dtype.itemsize for each in trained),
        kept=own + sum(each.numel * each.reduce_dtype.itemsize for each in trained),
    )
