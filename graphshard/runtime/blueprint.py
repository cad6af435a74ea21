"""The model as it is kept for later captures: its code and structure, no parameter memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def blueprint_of(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters on meta; `model` itself if it cannot be copied.

    What the forward does to Python attributes then happens to the copy.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        twin = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        vars(twin).update(vars(param))
        memo[id(param)] = twin
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever a module's attributes raise: locks, process groups, generators
        return model


@contextlib.contextmanager
def in_state(
    model: nn.Module, training: Sequence[bool], requires_grad: Mapping[str, bool]
) -> Iterator[None]:
    """`model` with the given `training` flags (in module order) and `requires_grad` (by name)."""
    modules = list(model.modules())
    params = dict(model.named_parameters())
    before = [module.training for module in modules], [p.requires_grad for p in params.values()]
    try:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for name, param in params.items():
            param.requires_grad_(requires_grad[name])
        yield
    finally:
        for module, flag in zip(modules, before[0], strict=True):
            module.training = flag
        for param, flag in zip(params.values(), before[1], strict=True):
            param.requires_grad_(flag)
