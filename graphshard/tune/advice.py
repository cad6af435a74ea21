"""What to say where nothing fits: what is too large, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from graphshard.cost.memory import OPTIMIZER, SHARDS
from graphshard.inspect.units_text import human_bytes
from graphshard.tune.auto_policy import AUTO, is_auto
from graphshard.tune.bounds import Bounds
from graphshard.tune.outcome import Outcome
from graphshard.tune.search import Search
from graphshard.tune.shallow import Shallow
from graphshard.tune.space import Space

_TRIED = 4
"""Groups of the least bounds that are simulated to find the least memory."""

_DOUBLINGS = 8
_ON_RANKS = (SHARDS, OPTIMIZER)


def advice(search: Search) -> str:
    """Why nothing fits in the budget of `search`, and what would."""
    least = _least(search)
    budget = human_bytes(search.budget)
    if least is None:
        return f"nothing that may be chosen can be simulated in {budget}; fix fewer fields"
    held = sorted(least.at_peak.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{human_bytes(size)} {kind}" for kind, size in held[:3] if size)
    policy = search.space.policy(least.candidate)
    about = "" if least.whole else "about "
    lines = [
        f"nothing fits in {budget}: the least that was found is {about}{human_bytes(least.peak)}, "
        f"under {policy!r}; at its peak it holds {parts}",
        *_what_would(search, least),
    ]
    return "\n".join(lines)


def _what_would(search: Search, least: Outcome) -> Iterator[str]:
    """Sentences on what would make it fit."""
    for name in ("recompute", "offload", "strategy", "units"):
        if not is_auto(getattr(search.space.auto, name)):
            freed = _least(_in(search, _space(search, name)))
            if freed is not None and freed.peak <= search.budget:
                policy = _space(search, name).policy(freed.candidate)
                yield f"it would with {name} left open: {human_bytes(freed.peak)} under {policy!r}"
    ranks = _ranks_that_fit(search, least)
    if ranks is not None:
        count, outcome = ranks
        yield f"it would on {count:,} ranks: {human_bytes(outcome.peak)} under the same policy"
    elif sum(least.at_peak.get(kind, 0) for kind in _ON_RANKS) < search.budget:
        yield (
            "more ranks would not do, as what does not fit is not sharded; a smaller batch or "
            "shorter sequences would make activations smaller, smaller units what is gathered"
        )
    else:
        yield "a smaller batch, or devices with more memory, would help"


def _space(search: Search, freed: str) -> Space:
    """The space in which the field `freed` is searched as well."""
    values: dict[str, Any] = {freed: AUTO}
    return replace(search.space, auto=replace(search.space.auto, **values))


def _in(search: Search, space: Space) -> Search:
    """The same search in another space."""
    return Search(search.simulator.within(space), _shallow(search, space), search.budget)


def _shallow(search: Search, space: Space) -> Shallow | None:
    return None if search.shallow is None else search.shallow.within(space)


def _least(search: Search) -> Outcome | None:
    """What needs the least memory of what was tried, and of the groups that may need the least."""
    bounds = Bounds(search.simulator)
    groups = search.space.groups()
    found = {group: search.bounds.get(group) or bounds.of(group) for group in groups}
    possible = [group for group in groups if found[group].possible]
    # Of equal bounds the later groups recompute and offload more.
    possible.reverse()
    order = sorted(possible, key=lambda group: found[group].bytes)
    candidates = [
        candidate
        for group in order[:_TRIED]
        for candidate in search.space.candidates(group)
        if candidate.forward == 0
    ]
    tried = [search.quick.outcome(candidate) for candidate in candidates]
    outcomes = [*search.tried.values(), *(o for o in tried if o is not None)]
    return min(outcomes, key=lambda outcome: outcome.peak, default=None)


def _ranks_that_fit(search: Search, least: Outcome) -> tuple[int, Outcome] | None:
    """How many ranks the policy that needs the least would fit on, doubling those there are."""
    mesh = search.space.mesh_shape
    for _ in range(_DOUBLINGS):
        mesh = (*mesh[:-1], 2 * mesh[-1])
        other = _in(search, replace(search.space, mesh_shape=mesh))
        outcome = other.quick.outcome(least.candidate)
        if outcome is not None and outcome.peak <= search.budget:
            return prod(mesh), outcome
    return None
