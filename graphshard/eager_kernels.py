"""Operators traced whole, as eager runs them, where torch's rules for tracing take them apart.

By such a rule interpolation becomes indexing: other numbers, and more memory and time. BatchNorm
keeps its rule: its operators do not say that they write running statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphshard import torch_trace

_INTERPOLATIONS = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
INTERPOLATION_BACKWARDS = frozenset(
    getattr(torch.ops.aten, f"{name}_backward").default for name in _INTERPOLATIONS
)
_OTHERS = (
    "hardshrink",
    "softshrink",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
)


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace the operators named above as single nodes, forward and backward."""
    packets = [getattr(torch.ops.aten, name) for name in (*_INTERPOLATIONS, *_OTHERS)]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    rules: dict[Any, Callable[..., Any] | None] = dict.fromkeys(operators)
    for name in _INTERPOLATIONS:
        packet = getattr(torch.ops.aten, name)
        rules[packet.vec] = partial(_interpolate, packet.default)
    with torch_trace.tracing_rules(rules):
        yield


def _interpolate(operator: Any, x: Tensor, size: Sequence[int] | None, *options: Any) -> Any:
    """What ATen does for `aten.upsample_*.vec`, but that it fixes sizes that are symbols."""
    *align_corners, scales = options
    if size is None:
        size = [
            extent * int(scale) if scale == int(scale) else torch.sym_int(extent * scale)
            for extent, scale in zip(x.shape[2:], scales, strict=True)
        ]
    return operator(x, size, *align_corners, *(scales or ()))


def interpolation_gradient(
    grad_output: Tensor, output_size: Sequence[Any], input_size: Sequence[Any], *_: Any
) -> Tensor:
    """An empty tensor like what one of `INTERPOLATION_BACKWARDS` gives; torch's own rule for that
    takes no sizes that are symbols.
    """
    return grad_output.new_empty(input_size)
