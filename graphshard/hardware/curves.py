"""Measured times as curves, which are interpolated, and as fitted lines; rates of attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from math import exp, log
from typing import Any

import torch

Points = tuple[tuple[float, float], ...]
"""Pairs of (FLOPs or bytes, seconds), both positive; amounts ascend, seconds never descend."""


_HUBER = 0.1
"""Relative errors above this count linearly in a fit instead of squared."""


_ROUNDS = 10


def seconds_at(points: Points, amount: float) -> float:
    """Return the seconds for `amount`, interpolated between logarithms of measured points.

    Below the first point the time is constant (a floor); above the last point it is proportional.
    """
    first, last = points[0], points[-1]
    if amount <= first[0]:
        return first[1]
    if amount >= last[0]:
        return last[1] * amount / last[0]
    above = bisect_left(points, (amount, 0.0))
    (low, low_seconds), (high, high_seconds) = points[above - 1 : above + 1]
    if low_seconds == high_seconds:
        return low_seconds
    share = log(amount / low) / log(high / low)
    return exp(log(low_seconds) * (1 - share) + log(high_seconds) * share)


def ascending(points: Sequence[tuple[float, float]]) -> Points:
    """Sort `points` by amount and raise each time to the longest of any smaller amount.

    Timings of small amounts are mostly floor and noise, so their order is arbitrary.
    """
    seconds_of: dict[float, float] = {}
    slowest = 0.0
    for amount, seconds in sorted(points):
        slowest = max(slowest, seconds)
        seconds_of[amount] = slowest
    return tuple(seconds_of.items())


def fit_line(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Fit non-negative coefficients so that `rows @ coefficients` is close to `seconds`.

    Least squares of relative errors with Huber weights, by iterated reweighting (Holland and
    Welsch 1977), since timings differ by orders of magnitude and some were disturbed. Every subset
    of coefficients is tried as the non-zero ones, which is exact for the two or three used here.
    """
    kind: Any = {"dtype": torch.float64, "device": "cpu"}
    times = torch.tensor(seconds, **kind)
    table = torch.tensor([list(row) for row in rows], **kind) / times[:, None]
    columns = table.shape[1]
    scale = table.abs().amax(0).clamp_min(1e-300)  # so that no column is lost in another's rounding
    best, least_loss = (0.0,) * columns, float("inf")
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            columns_kept = list(chosen)
            coefficients = _reweighted(table[:, columns_kept] / scale[columns_kept])
            if (coefficients < 0).any():
                continue
            loss = _huber((table[:, columns_kept] / scale[columns_kept]) @ coefficients - 1)
            if loss < least_loss:
                least_loss = loss
                by_column = dict(
                    zip(columns_kept, (coefficients / scale[columns_kept]).tolist(), strict=True)
                )
                best = tuple(by_column.get(column, 0.0) for column in range(columns))
    return best


def _reweighted(table: torch.Tensor) -> torch.Tensor:
    """Return the coefficients that bring the rows of `table` closest to 1."""
    weights = torch.ones_like(table[:, 0])
    coefficients = torch.zeros_like(table[0])
    for _ in range(_ROUNDS):
        root = weights.sqrt()[:, None]
        coefficients = torch.linalg.lstsq(table * root, root, driver="gelsd").solution[:, 0]
        errors = (table @ coefficients - 1).abs()
        weights = (_HUBER / errors.clamp_min(1e-12)).clamp_max(1.0)
    return coefficients


def _huber(errors: torch.Tensor) -> float:
    sizes = errors.abs()
    inside = sizes.clamp_max(_HUBER)
    return float((inside * (sizes - inside / 2)).sum())


# -- attention kernels: which one runs, and how fast it is by length and head size -----------------

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

    Rates of cuDNN mean that the GPU can run it.
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
