"""The part of `graphshard.torch_compat` about operators that raise, for torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from graphshard.torch_compat import private

_CHECK = torch.ops.aten._linalg_check_errors.default


@contextlib.contextmanager
def checks_as_operators() -> Iterator[None]:
    """Trace what raises on a bad matrix as any other operator, and keep it though nobody reads it.

    Torch 2.13 threads tokens through it, for which its own fake tensors have no rule; before, it
    was dropped from a trace.
    """
    registry = private("torch._library.simple_registry", "singleton")
    unread = private("torch.fx.node", "_side_effectful_functions")
    holder = registry.find(_CHECK.name().partition(".")[0]).effect
    effect, was_kept = holder.effect, _CHECK in unread
    holder.register(None)
    unread.add(_CHECK)
    try:
        yield
    finally:
        holder.register(effect)
        if not was_kept:
            unread.discard(_CHECK)
