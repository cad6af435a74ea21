"""Counting the steps that optimizers take with a parameter.

Version counters do not tell: torch's foreach and fused optimizers, which are the default, change a
DTensor without changing its version (seen in torch 2.13).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEPS = "_graphshard_steps"


def count_steps(param: Tensor) -> None:
    """Count from now on, where nobody does, the steps of any optimizer that has `param`."""
    _watch()
    if not hasattr(param, _STEPS):
        setattr(param, _STEPS, 0)


def steps_of(param: Tensor) -> int:
    """The steps counted so far in which `param` had a gradient."""
    return getattr(param, _STEPS, 0)


@cache
def _watch() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            steps = getattr(param, _STEPS, None)
            if steps is not None and param.grad is not None:
                setattr(param, _STEPS, steps + 1)
