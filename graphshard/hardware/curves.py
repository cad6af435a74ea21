"""Measured times as curves, which are interpolated, and as fitted lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations
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

    Args:
        points: one or more, by ascending amount.
        amount: FLOPs or bytes, the unit of the points' amounts.
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

    Args:
        rows: one per measurement: the factors of the coefficients.
        seconds: the time of each measurement, positive.

    Returns:
        One coefficient per column, each 0 or more.
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
