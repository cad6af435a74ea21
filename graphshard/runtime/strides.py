"""The strides that the gradients of outputs were traced with, which backward relies on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphshard.program.program import Program
from graphshard.program.sizes import Sizes
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.unbacked import depends_on_values

Strides = tuple[int, ...]


def tangent_strides(
    program: Program,
) -> list[Callable[[tuple[int, ...], Tensor], Strides]]:
    """For each tangent, the function to the strides it was traced with.

    It takes the symbolic sizes of a call, and the tangent, off which sizes are read that depend on
    values.
    """
    vals = [entry.tangent.meta["val"] for entry in program.outputs if entry.tangent is not None]
    return [_strides_of(val, program.sizes) for val in vals]


def _strides_of(val: Tensor, sizes: Sizes | None) -> Callable[[tuple[int, ...], Tensor], Strides]:
    traced = val.stride()
    if sizes is None or not any(isinstance(stride, SYMBOLIC) for stride in traced):
        return lambda _, __: traced
    dims = {
        torch_compat.size_expression(size): dim
        for dim, size in enumerate(val.shape)
        if depends_on_values(size)
    }
    evaluate = sizes.evaluator(traced, dims)
    return lambda values, tangent: evaluate(*values, *map(tangent.size, dims.values()))


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of `tensor` with these strides."""
    result = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)
