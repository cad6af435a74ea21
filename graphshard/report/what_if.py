"""Other policies as points of time and memory, and what tells any two of them apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from graphshard.cost.compare import compare
from graphshard.errors import CostError

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate
    from graphshard.tune.tuning import Tuning

THIS = "this policy"


def what_if_dict(
    estimate: Estimate, others: Mapping[str, Estimate] | None, tuning: Tuning | None
) -> dict[str, Any] | None:
    """The points and comparisons as plain data; None if there is nothing but `estimate`.

    points: those with an estimate first. pairs: the text of `graphshard.compare` by the numbers of
    two points, as "0,1".
    """
    if not others and tuning is None:
        return None
    if THIS in (others or {}):
        raise CostError(f"{THIS!r} is the report's own name for its estimate; choose another one")
    estimates = {THIS: estimate, **(others or {})}
    compared = {repr(e.plan.policy) for e in estimates.values()}
    if tuning is not None and tuning.code not in compared:
        estimates["chosen by the search"] = tuning.estimate
        compared.add(tuning.code)
    points = [_point(name, e) for name, e in estimates.items()]
    for result in () if tuning is None else tuning.tried:
        if repr(result.policy) not in compared:
            points.append({"name": "", "estimated": False, **result.to_dict()})
    pairs = {
        f"{a},{b}": str(compare(one, other, names=(first, second)))
        for (a, (first, one)), (b, (second, other)) in combinations(enumerate(estimates.items()), 2)
    }
    return {"points": points, "pairs": pairs}


def _point(name: str, estimate: Estimate) -> dict[str, Any]:
    return {
        "name": name,
        "estimated": True,
        "policy": repr(estimate.plan.policy),
        "seconds": estimate.step_seconds,
        "bytes": estimate.peak_bytes,
        "whole": True,
    }
