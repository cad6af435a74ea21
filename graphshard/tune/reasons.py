"""Why the policies next to the chosen one are not better, each in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from graphshard.cost.memory import OPTIMIZER, SHARDS
from graphshard.format import human_bytes, human_seconds
from graphshard.policy.base import Policy
from graphshard.policy.code import value_code
from graphshard.tune.auto_policy import AUTO, is_auto
from graphshard.tune.bounds import Bounds
from graphshard.tune.search import Search
from graphshard.tune.shallow import Shallow
from graphshard.tune.space import Candidate, Group, Sharding, Space
from graphshard.tune.tuning import Outcome

Neighbour = tuple[str, Candidate]


_SAME = 5e-4
"""Times are called equal that differ by no more than this part."""


def reasons(search: Search, winner: Outcome) -> dict[str, str]:
    """By what is other, what that would cost."""
    shown: dict[str, str] = {}
    own = search.quick.outcome(winner.candidate) if search.shallow else winner
    if own is None:
        own = winner
    for name, candidate in _neighbours(search, winner.candidate):
        if name in shown:
            continue
        bound = search.bounds.get(candidate.group)
        if bound is not None and not bound.possible:
            continue
        if bound is not None and bound.bytes > search.budget:
            need = f"needs at least {human_bytes(bound.bytes)} of {human_bytes(search.budget)}"
            shown[name] = need
            continue
        outcome = search.whole.get(candidate)
        base = winner if outcome is not None else own
        if outcome is None and candidate.group != winner.candidate.group:
            outcome, base = _alike(search, candidate, winner, own)
        outcome = outcome or search.quick.outcome(candidate)
        if outcome is not None:
            shown[name] = _why(outcome, base, winner, search.budget)
    return shown


def _alike(
    search: Search, candidate: Candidate, winner: Outcome, own: Outcome
) -> tuple[Outcome | None, Outcome]:
    """Outcomes of two groups, to be compared: where not all of all groups are tried, of gathers
    issued in the way that was, unless the other seems no slower so.
    """
    probe = search.space.probes(winner.candidate.group)[0]
    mine = None if search.exhaustive else search.quick.outcome(probe)
    if mine is not None:
        found = search.quick.outcome(replace(probe, group=candidate.group))
        if found is not None and found.seconds > mine.seconds * (1 + _SAME):
            return found, mine
    return search.quick.outcome(candidate), own


def _why(outcome: Outcome, base: Outcome, winner: Outcome, budget: int) -> str:
    about = "" if outcome.whole else "about "
    if outcome.peak > budget:
        most = max(outcome.at_peak, key=lambda kind: outcome.at_peak[kind])
        return (
            f"needs {about}{human_bytes(outcome.peak)} of {human_bytes(budget)}, "
            f"{human_bytes(outcome.at_peak[most])} of it {most}"
        )
    longer = outcome.seconds / base.seconds - 1
    if abs(longer) < _SAME:
        more = outcome.peak - base.peak
        same = f"as fast, and needs {human_bytes(abs(more))} {'more' if more > 0 else 'less'}"
        return "makes no difference" if not more else same
    text = f"{about}{abs(longer):.1%} {'slower' if longer > 0 else 'faster'}"
    compute, exposed = outcome.compute - base.compute, outcome.exposed - base.exposed
    if compute > exposed:
        return f"{text}, {human_seconds(compute)} more of compute" if compute > 0 else text
    if outcome.exposed > 0:
        return f"{text}, {human_seconds(outcome.exposed)} of communication exposed"
    return text


def _neighbours(search: Search, candidate: Candidate) -> Iterator[Neighbour]:
    """Candidates that differ from `candidate` in one thing, named by it."""
    yield from _issued_otherwise(search, candidate)
    for name, group in _other_groups(search, candidate.group):
        yield name, replace(candidate, group=group)


def _issued_otherwise(search: Search, candidate: Candidate) -> Iterator[Neighbour]:
    for other in search.space.candidates(candidate.group):
        if other.schedule != candidate.schedule:
            if candidate.schedule == "fsdp" or (other.backward, other.forward) == ("pre", 0):
                yield f"schedule={other.schedule!r}", other
        elif other.forward == candidate.forward and other.backward != candidate.backward:
            yield f"backward_prefetch={other.backward!r}", other
        elif other.backward == candidate.backward and other.forward != candidate.forward:
            yield f"forward_prefetch={other.forward}", other


def _other_groups(search: Search, group: Group) -> Iterator[tuple[str, Group]]:
    for index, units in enumerate(search.space.unit_choices):
        if index != group.units:
            yield f"units {_plain(units)}", replace(group, units=index)
    for found in _groups_like(search, group):
        yield _sharding(found.sharding), found
    for recompute in search.space.recomputes:
        if recompute != group.recompute:
            said = value_code(Policy(recompute=recompute).recompute, named=True)
            yield f"recompute={said}", replace(group, recompute=recompute, budget=None)
    for found in search.bounds:
        if found == replace(group, offload=found.offload) and found != group:
            yield f"offload={sorted(found.offload or ()) or None!r}", found


def _groups_like(search: Search, group: Group) -> Iterator[Group]:
    """The groups with another sharding of the same units."""
    shardings = dict.fromkeys(g.sharding for g in search.bounds if g.units == group.units)
    return (replace(group, sharding=other) for other in shardings if other != group.sharding)


def _plain(units: Policy) -> str:
    return repr(units).removeprefix("graphshard.")


def _sharding(sharding: Sharding) -> str:
    said = [f"strategy={sharding.strategy.value}"]
    if sharding.reshard is not None:
        said.append(f"reshard_after_forward={sharding.reshard!r}")
    if sharding.root:
        said.append("reshard_root=True")
    if sharding.kept:
        said.append("the last block kept")
    return ", ".join(said)


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
