"""Optimizers made of the parameters of the model that was compiled, which nothing trains.

The original model stays as it is, so a step of such an optimizer changes nothing that a sharded
module computes with, and the loss stands still without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard.errors import PolicyError, RuntimeStateError

_INSTEAD = "make it of sharded.parameters(), after graphshard.compile"


@dataclass(frozen=True)
class _Origin:
    """The name of an original parameter, and the sharded parameter that was made from it."""

    name: str
    shard: weakref.ref[nn.Parameter]


_origins: Any = WeakTensorKeyDictionary()  # of original parameters
_looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_originals(model: nn.Module, sharded: nn.Module) -> None:
    """Let a step of an optimizer that holds `model`'s parameters instead of `sharded`'s raise."""
    shards = dict(sharded.named_parameters())
    for name, param in model.named_parameters():
        shard = shards.get(name)
        if shard is not None and shard is not param:  # as an ignored one is
            _origins[param] = _Origin(name, weakref.ref(shard))
    _watch_steps()


def require_shards(optimizer: Optimizer) -> None:
    """Check that `optimizer` holds no parameter of a model that was compiled."""
    for param, origin in _originals(optimizer):
        raise PolicyError(
            f"the optimizer holds {origin.name!r}, of shape {list(param.shape)}, of the model that "
            f"was given to graphshard.compile, which is not trained; {_INSTEAD}"
        )


def _originals(optimizer: Optimizer) -> Iterable[tuple[Tensor, _Origin]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            origin = _origins.get(param)
            if origin is not None and origin.shard() is not None:
                yield param, origin


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would change nothing, where the shards have the gradients.

    Each optimizer is looked at until it is known to be right. One of an original that has gradients
    of its own, as a reference has, is.
    """
    if optimizer in _looked_at:
        return
    originals = list(_originals(optimizer))
    if not originals or any(param.grad is not None for param, _ in originals):
        _looked_at.add(optimizer)
        return
    for _, origin in originals:
        shard = origin.shard()
        if shard is not None and shard.grad is not None:
            raise RuntimeStateError(
                f"the optimizer holds {origin.name!r} of the model that was given to "
                "graphshard.compile, and the gradient is the sharded module's, so that this step "
                f"would change nothing; {_INSTEAD}"
            )
