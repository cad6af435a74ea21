"""Statistics of a ratio of paired measurements."""

from __future__ import annotations

from math import comb


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics between which the median lies with at least `confidence`.

    Each value is below the true median with probability 1/2, so the number below it is binomial
    (the sign test). With fewer than six values the range itself covers less than 95 %.
    """
    ordered, n = sorted(values), len(values)
    drop, tail = 0, 0.5**n
    while 2 * (tail + comb(n, drop + 1) * 0.5**n) <= 1 - confidence:
        drop += 1
        tail += comb(n, drop) * 0.5**n
    return ordered[drop], ordered[n - 1 - drop]
