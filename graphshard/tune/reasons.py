"""Why policies next to the chosen one are not better, and what would make a step fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from graphshard.cost.memory import OPTIMIZER, SHARDS
from graphshard.format import human_bytes, human_seconds
from graphshard.policy.base import Policy, value_code
from graphshard.tune.bounds import Bound, Bounds
from graphshard.tune.request import AUTO, is_auto
from graphshard.tune.search import Search
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import PLAIN, Candidate, CandidateGroup, Sharding, Space
from graphshard.tune.tuning import EQUAL, CandidateResult

Neighbour = tuple[str, Candidate]


_ROUNDS = 4
"""The most times that a better neighbour becomes the winner."""


def settle(search: Search, winner: CandidateResult) -> tuple[CandidateResult, dict[str, str]]:
    """Replace `winner` by its best neighbour until none is better; return it and the reasons."""
    for _ in range(_ROUNDS):
        why = reasons(search, winner)
        best = search.best()
        if best is None or best.candidate == winner.candidate:
            return winner, why
        winner = best
    return winner, reasons(search, winner)


def reasons(search: Search, winner: CandidateResult) -> dict[str, str]:
    """Return why each neighbour of the winner is not better, by the field in which it differs.

    Neighbours that are simulated for it join the results of `search`.
    """
    reason_of: dict[str, str] = {}
    for name, candidate in _neighbours(search, winner.candidate):
        if name in reason_of:
            continue
        reason = _reason(search, candidate, winner)
        if reason is not None:
            reason_of[name] = reason
    return reason_of


def _reason(search: Search, candidate: Candidate, winner: CandidateResult) -> str | None:
    """Say why `candidate` is not better than `winner`.

    None if the model cannot be sharded so, or there is no time to simulate it.
    """
    bound = _bound_of(search, candidate.group)
    if bound is not None and not bound.possible:
        return None
    if bound is not None and bound.bytes > search.budget:
        return f"needs at least {human_bytes(bound.bytes)} of {human_bytes(search.budget)}"
    if candidate not in search.results:
        reason = _by_search(search, candidate, winner, bound)
        if reason:
            return reason
        if search.over():
            return None
    result = search.result(candidate)
    return None if result is None else _why(result, winner, search.budget)


def _chooses(group: CandidateGroup) -> bool:
    """Whether a budget chooses what `group` recomputes."""
    return isinstance(group.recompute, frozenset) and "budget" in group.recompute


def _bound_of(search: Search, group: CandidateGroup) -> Bound | None:
    """The bound of `group`, whatever its budget; None if it is unknown."""
    if _chooses(group):
        everything = replace(group, budget=None, recompute=search.space.recompute_all)
        return search.budget_bounds.get(everything)
    return search.bounds.get(replace(group, budget=None))


def _by_search(
    search: Search, candidate: Candidate, winner: CandidateResult, bound: Bound | None
) -> str:
    """Say why no candidate like `candidate` won, by its bound or what was tried; "" if unknown."""
    if candidate.group == winner.candidate.group:
        return ""
    if bound is not None and bound.seconds > winner.seconds * (1 + EQUAL):
        return f"at least {bound.seconds / winner.seconds - 1:.1%} slower"
    group = replace(candidate.group, budget=None)
    groups = {group}
    if group.recompute is None:  # a budget may have chosen to recompute nothing
        groups.add(search.space.with_budgets(group))
    tried = [
        result
        for result in search.results.values()
        if replace(result.candidate.group, budget=None) in groups
    ]
    same = [result for result in tried if result.candidate.schedule == candidate.schedule]
    best = search.best(same) or min(same, key=lambda result: result.peak, default=None)
    if (
        best is not None
        and _chooses(best.candidate.group)
        and group.recompute is None
        and best.seconds <= winner.seconds * (1 + EQUAL)
    ):
        return ""  # no recomputation is simpler, and wins if it is as fast
    if best is not None:
        return _why(best, winner, search.budget)
    other = search.best(tried)
    if other is None or other.seconds <= winner.seconds:
        return ""
    return f"{_why(other, winner, search.budget)}, with schedule={other.candidate.schedule!r}"


def _why(result: CandidateResult, base: CandidateResult, budget: int) -> str:
    if result.peak > budget:
        most = max(result.at_peak, key=lambda kind: result.at_peak[kind])
        return (
            f"needs {human_bytes(result.peak)} of {human_bytes(budget)}, "
            f"{human_bytes(result.at_peak[most])} of it {most}"
        )
    longer = result.seconds / base.seconds - 1
    if abs(longer) <= EQUAL:
        more = result.peak - base.peak
        same = f"as fast, and needs {human_bytes(abs(more))} {'more' if more > 0 else 'less'}"
        return "makes no difference" if not more else same
    text = f"{abs(longer):.1%} {'slower' if longer > 0 else 'faster'}"
    compute, exposed = result.compute - base.compute, result.exposed - base.exposed
    if compute > exposed:
        return f"{text}, {human_seconds(compute)} more of compute" if compute > 0 else text
    if result.exposed > 0:
        return f"{text}, {human_seconds(result.exposed)} of communication exposed"
    return text


def _neighbours(search: Search, candidate: Candidate) -> Iterator[Neighbour]:
    """Yield candidates that differ from `candidate` in one field, with a text of that field."""
    yield from _other_issues(search, candidate)
    for name, group in _other_groups(search, candidate.group):
        same = group.sharding.strategy is candidate.group.sharding.strategy
        if candidate.schedule == PLAIN or same or search.space.is_default(group):
            yield name, replace(candidate, group=group)


def _other_issues(search: Search, candidate: Candidate) -> Iterator[Neighbour]:
    for other in search.space.candidates(candidate.group):
        if other.schedule != candidate.schedule:
            if other == _best_issue(search, candidate.group, other.schedule):
                yield f"schedule={other.schedule!r}", other
        elif other.forward == candidate.forward and other.backward != candidate.backward:
            yield f"backward_prefetch={other.backward!r}", other
        elif other.backward == candidate.backward and other.forward != candidate.forward:
            yield f"forward_prefetch={other.forward}", other


def _best_issue(search: Search, group: CandidateGroup, schedule: str) -> Candidate:
    """The fastest candidate of `group` with `schedule`, or the likeliest if none was tried."""
    tried = [
        result
        for candidate in search.space.candidates(group)
        if candidate.schedule == schedule and (result := search.results.get(candidate))
    ]
    best = search.best(tried)
    if best is not None:
        return best.candidate
    if schedule != PLAIN:
        return Candidate(group, schedule=schedule)
    return search.space.likeliest(group)


def _other_groups(search: Search, group: CandidateGroup) -> Iterator[tuple[str, CandidateGroup]]:
    for index, units in enumerate(search.space.unit_choices):
        if index != group.units:
            yield f"units {_plain(units)}", replace(group, units=index)
    shardings = dict.fromkeys(g.sharding for g in search.bounds if g.units == group.units)
    for sharding in shardings:
        if sharding != group.sharding:
            yield _sharding(sharding), replace(group, sharding=sharding)
    for recompute in search.space.recomputes:
        if recompute != group.recompute:
            code = value_code(Policy(recompute=recompute).recompute, named=True)
            yield f"recompute={code}", replace(group, recompute=recompute, budget=None)
    for other in search.bounds:
        if other == replace(group, offload=other.offload) and other != group:
            yield f"offload={sorted(other.offload or ()) or None!r}", other


def _plain(units: Policy) -> str:
    return repr(units).removeprefix("graphshard.")


def _sharding(sharding: Sharding) -> str:
    fields = [f"strategy={sharding.strategy.value}"]
    if sharding.reshard is not None:
        fields.append(f"reshard_after_forward={sharding.reshard!r}")
    if sharding.reshard_root:
        fields.append("reshard_root=True")
    return ", ".join(fields)


_TRIED = 4
"""Groups with the smallest bounds that are simulated to find the least memory."""


_DOUBLINGS = 8


_ON_RANKS = (SHARDS, OPTIMIZER)


def advice(search: Search) -> str:
    """Return a text on why no policy fits in the budget of `search`, and what would fit."""
    least = _least(search)
    budget = human_bytes(search.budget)
    if least is None:
        return f"no policy that may be chosen can be simulated in {budget}; fix fewer fields"
    at_peak = sorted(least.at_peak.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{human_bytes(size)} {kind}" for kind, size in at_peak[:3] if size)
    policy = search.space.policy(least.candidate)
    lines = [
        f"nothing fits in {budget}: the least that was found is {human_bytes(least.peak)}, "
        f"under {policy!r}; at its peak it holds {parts}",
        *_remedies(search, least),
    ]
    return "\n".join(lines)


def out_of_time(search: Search) -> str:
    """Return a text on a search that found nothing that fits before its time was over."""
    found = min(search.results.values(), key=lambda result: result.peak, default=None)
    least = "" if found is None else f"; the least so far needs {human_bytes(found.peak)}"
    return (
        f"no policy that fits in {human_bytes(search.budget)} was found in "
        f"{search.limit.seconds:g} s{least}, and {len(search.untried)} kinds of policies were not "
        "tried; give more time (seconds=, on the command line --seconds), or fix fields, so that "
        "there is less to search"
    )


def _remedies(search: Search, least: CandidateResult) -> Iterator[str]:
    for name in ("recompute", "offload", "strategy", "units"):
        if not is_auto(getattr(search.space.auto, name)):
            smallest = _least(_search_in(search, _space(search, name)))
            if smallest is not None and smallest.peak <= search.budget:
                policy = _space(search, name).policy(smallest.candidate)
                size = human_bytes(smallest.peak)
                yield f"it would with {name} left open: {size} under {policy!r}"
    ranks = _ranks_that_fit(search, least)
    if ranks is not None:
        count, result = ranks
        yield f"it would on {count:,} ranks: {human_bytes(result.peak)} under the same policy"
    elif sum(least.at_peak.get(kind, 0) for kind in _ON_RANKS) < search.budget:
        yield (
            "more ranks would not do, as what does not fit is not sharded; a smaller batch or "
            "shorter sequences would make activations smaller, and smaller units the gathered "
            "parameters"
        )
    else:
        yield "a smaller batch, or devices with more memory, would help"


def _space(search: Search, name: str) -> Space:
    values: dict[str, Any] = {name: AUTO}
    return replace(search.space, auto=replace(search.space.auto, **values))


def _search_in(search: Search, space: Space) -> Search:
    return Search(Simulator(search.simulator.captures, space), search.budget)


def _least(search: Search) -> CandidateResult | None:
    """Return the result with the least memory, after trying the groups with the least bounds."""
    bounds = Bounds(search.simulator)
    groups = search.space.groups()
    bound_of = {group: search.bounds.get(group) or bounds.of(group) for group in groups}
    possible = [group for group in groups if bound_of[group].possible]
    # Among groups with equal bounds, later ones recompute and offload more.
    possible.reverse()
    order = sorted(possible, key=lambda group: bound_of[group].bytes)
    candidates = [
        candidate
        for group in order[:_TRIED]
        for candidate in search.space.candidates(group)
        if candidate.forward == 0
    ]
    tried = [search.result(candidate) for candidate in candidates]
    results = [*search.results.values(), *(o for o in tried if o is not None)]
    return min(results, key=lambda result: result.peak, default=None)


def _ranks_that_fit(search: Search, least: CandidateResult) -> tuple[int, CandidateResult] | None:
    """Return a number of ranks on which the smallest policy fits, by doubling, and its result."""
    mesh = search.space.mesh_shape
    for _ in range(_DOUBLINGS):
        mesh = (*mesh[:-1], 2 * mesh[-1])
        other = _search_in(search, replace(search.space, mesh_shape=mesh))
        result = other.result(least.candidate)
        if result is not None and result.peak <= search.budget:
            return prod(mesh), result
    return None
