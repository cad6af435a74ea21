"""Attention kernels: which one runs, and how fast it is by length and head size."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import log

import torch

from graphshard.hardware.curves import Points

ATTENTION_KERNELS = ("fa1", "fa2", "fa3", "cudnn")
"""FlashAttention 1, 2 and 3, and the fused attention of cuDNN."""


DIRECTIONS = ("forward", "backward")


_CUDNN_SINCE = (2, 11)
"""The first torch whose wheels bring a cuDNN that `scaled_dot_product_attention` prefers.

Its order of backends begins with cuDNN on Hopper and Blackwell from cuDNN 9.15.1 on
(`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
"""


def default_kernel(rates: Mapping[str, Points], torch_version: str | None = None) -> str:
    """The kernel that torch takes by default on a GPU with `rates`; "" if it has none.

    Args:
        rates: by "KERNEL.DIRECTION.HEAD SIZE". Rates of cuDNN mean that the GPU can run it.
        torch_version: such as "2.13.0"; by default the installed one's.
    """
    kernels = {name.partition(".")[0] for name in rates}
    version = (torch_version or torch.__version__).split(".")
    if "cudnn" in kernels and (int(version[0]), int(version[1])) >= _CUDNN_SINCE:
        return "cudnn"
    return next((kernel for kernel in ("fa2", "fa1", "fa3", "cudnn") if kernel in kernels), "")


def rate_of(
    rates: Mapping[str, Points], kernel: str, direction: str, length: int, head: int
) -> float | None:
    """The fraction of the peak that `kernel` reaches; None if `rates` has no row of it.

    Lengths between two points are interpolated by their logarithm, and lengths outside take the
    nearest point. The row is that of the next larger head size, as kernels pad heads, or of the
    largest one.
    """
    prefix = f"{kernel}.{direction}."
    heads = sorted(int(name.removeprefix(prefix)) for name in rates if name.startswith(prefix))
    if not heads:
        return None
    row = next((size for size in heads if size >= head), heads[-1])
    return _at(rates[f"{prefix}{row}"], length)


def _at(points: Points, length: int) -> float:
    if length <= points[0][0]:
        return points[0][1]
    for (short, slow), (long, fast) in pairwise(points):
        if length <= long:
            return slow + (fast - slow) * log(length / short) / log(long / short)
    return points[-1][1]
