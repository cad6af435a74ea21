"""The gradients of outputs, as backward was traced for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from graphshard.program import Program


def tangent_strides(program: Program) -> Callable[[tuple[int, ...]], list[tuple[int, ...]]]:
    """From a call's symbolic sizes to the strides of the tangents, as traced."""
    strides = [o.tangent.meta["val"].stride() for o in program.outputs if o.tangent is not None]
    if program.sizes is None:
        return lambda sizes: strides
    flat = program.sizes.evaluator([size for stride in strides for size in stride])

    def at(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        numbers = iter(flat(*sizes))
        return [tuple(islice(numbers, len(stride))) for stride in strides]

    return at


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of `tensor` that lies as `stride` says."""
    result = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)
