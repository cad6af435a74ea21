"""Making a failing case smaller: parts are dropped while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz_case import Case
from fuzz_play import Outcome

DROPPABLE = (
    "backend",
    "dynamic",
    "check",
    "start",
    "mesh",
    "ranks",
    "tight",
    "far",
    "on_dtensors",
    "root",
    "optimizer",
    "autocast",
    "dtype",
)


def minimise(case: Case, outcome: Outcome, play: Callable[[Case], Outcome]) -> tuple[Case, Outcome]:
    """The smallest case on the way that fails alike, and its outcome.

    Args:
        case: that fails.
        outcome: of it.
        play: the outcome of a case.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(case):
            result = play(candidate)
            if _alike(result, outcome):
                case, outcome, smaller = candidate, result, True
                break
    return case, outcome


def _alike(result: Outcome, outcome: Outcome) -> bool:
    """Whether both are of a kind, and crashes of one class of error."""
    first = [str(each.what).split(":")[0] for each in (result, outcome)]
    return result.kind == outcome.kind and (result.kind == "mismatch" or first[0] == first[1])


def _candidates(case: Case) -> Iterator[Case]:
    """Cases with one part less, the largest parts first."""
    yield from _shorter(case)
    yield from _plainer_policies(case)
    plain = Case(seed=0)
    for name in DROPPABLE:
        if getattr(case, name) != getattr(plain, name) and not (case.mixed and name == "dtype"):
            yield replace(case, **{name: getattr(plain, name)})
    for output in ("loss", "tensor"):
        if case.output not in ("loss", output):
            yield replace(case, output=output)
    for index, step in enumerate(case.steps):
        if step != "train":
            yield replace(case, steps=_with(case.steps, index, "train"))
    for index, block in enumerate(case.blocks):
        if block != "linear":
            yield replace(case, blocks=_with(case.blocks, index, "linear"))


def _shorter(case: Case) -> Iterator[Case]:
    """Without one of its steps, or one of its blocks."""
    for index in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=_with(case.steps, index))
    for index in range(len(case.blocks)):
        if len(case.blocks) > 1:
            yield replace(case, blocks=_with(case.blocks, index))


OWN = ("kind", "based", "modules", "least", "min_num_params", "force_leaf")
"""Fields that one kind of policy has."""


def _plainer_policies(case: Case) -> Iterator[Case]:
    """Without one of its options, or with every block as a unit."""
    for name in case.policy:
        needed = name in OWN or (name == "memory_budget" and "recompute" in case.policy)
        if not needed:
            yield replace(case, policy={k: v for k, v in case.policy.items() if k != name})
    if case.policy["kind"] != "block":
        kept = {name: value for name, value in case.policy.items() if name not in OWN}
        yield replace(case, policy={"kind": "block", **kept})


def _with(items: tuple[str, ...], index: int, *other: str) -> tuple[str, ...]:
    """`items` with `other` in place of the one at `index`."""
    return (*items[:index], *other, *items[index + 1 :])
