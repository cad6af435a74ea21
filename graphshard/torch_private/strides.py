"""Strides of results for which torch 2.13 has fake kernels that give others than the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphshard.torch_private.compat import suggested_format

_BACKWARD = torch.ops.aten.native_batch_norm_backward.default


OTHER_STRIDES = frozenset(
    {
        _BACKWARD,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten._native_batch_norm_legit_no_training.default,
    }
)
"""The operators whose results `with_real_strides` changes."""


def with_real_strides(operator: Any, args: Sequence[Any], results: Any) -> Any:
    """`results` of `operator` on fake tensors, with the strides that its real kernel gives them.

    On CPUs a BatchNorm's result, and the gradient of its input, are dense in the memory format of
    the input. Torch's rule keeps any order of dims, so that a later `view` would fail.

    Args:
        operator: any operator.
        args: its arguments.
        results: what its fake kernel gave; returned as they are for most operators.
    """
    if operator not in OTHER_STRIDES:
        return results
    x: Tensor = args[1 if operator is _BACKWARD else 0]
    first, *others = results
    if first is None or x.device.type != "cpu":
        return results
    return (torch.empty_like(first, memory_format=suggested_format(x)), *others)
