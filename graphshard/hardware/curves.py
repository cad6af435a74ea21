"""What was measured, as curves and lines: interpolated where between, fitted where straight."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations
from math import exp, log

import torch

Points = tuple[tuple[float, float], ...]
"""(amount, seconds), both positive and both ascending."""


_HUBER = 0.1
"""Relative errors beyond this pull on a fit by their size, not by its square."""


_ROUNDS = 10


def seconds_at(points: Points, amount: float) -> float:
    """Seconds for `amount`, by interpolation between the logarithms of measured points.

    Below the first point it takes as long as there (a floor), above the last one longer in
    proportion.

    Args:
        points: one or more, by ascending amount.
        amount: FLOPs or bytes, as the points were measured in.
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
    """`points` by amount, where none takes less time than one of a smaller amount.

    Timings of small amounts are all floor and noise, and may come out in any order.
    """
    found: dict[float, float] = {}
    slowest = 0.0
    for amount, seconds in sorted(points):
        slowest = max(slowest, seconds)
        found[amount] = slowest
    return tuple(found.items())


def fit_line(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients, none negative, by which `rows` give `seconds` with small relative errors.

    Least squares of relative errors with Huber's weights, by iterated re-weighting (Holland and
    Welsch, "Robust regression using iteratively reweighted least-squares", 1977): timings differ by
    orders of magnitude, and some were disturbed. A coefficient that would be negative is zero; of
    all choices of those the best is taken, which is exact for the two or three there are.

    Args:
        rows: one per measurement: what each coefficient is multiplied by.
        seconds: what each took, positive.

    Returns:
        One coefficient per column.
    """
    taken = torch.tensor(seconds, dtype=torch.float64)
    table = torch.tensor([list(row) for row in rows], dtype=torch.float64) / taken[:, None]
    columns = table.shape[1]
    scale = table.abs().amax(0).clamp_min(1e-300)  # so that no column is lost in another's rounding
    best, least = (0.0,) * columns, float("inf")
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            kept = list(chosen)
            found = _reweighted(table[:, kept] / scale[kept])
            if (found < 0).any():
                continue
            loss = _huber((table[:, kept] / scale[kept]) @ found - 1)
            if loss < least:
                least = loss
                parts = dict(zip(kept, (found / scale[kept]).tolist(), strict=True))
                best = tuple(parts.get(column, 0.0) for column in range(columns))
    return best


def _reweighted(table: torch.Tensor) -> torch.Tensor:
    """The coefficients by which the rows of `table` come nearest to 1."""
    weights = torch.ones(len(table), dtype=torch.float64)
    found = torch.zeros(table.shape[1], dtype=torch.float64)
    for _ in range(_ROUNDS):
        root = weights.sqrt()[:, None]
        found = torch.linalg.lstsq(table * root, root, driver="gelsd").solution[:, 0]
        errors = (table @ found - 1).abs()
        weights = (_HUBER / errors.clamp_min(1e-12)).clamp_max(1.0)
    return found


def _huber(errors: torch.Tensor) -> float:
    sizes = errors.abs()
    inside = sizes.clamp_max(_HUBER)
    return float((inside * (sizes - inside / 2)).sum())
