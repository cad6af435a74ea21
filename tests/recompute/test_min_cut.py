"""Minimum cuts against known optima, and against trying everything."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.recompute.problem import CutProblem, Cutter, Value


def test_what_must_not_be_recomputed_is_saved_and_views_are_not() -> None:
    # a random draw, and a view of it that backward reads
    values = (Value((), 6, None), Value((0,), 5, None), Value((1,), None, 0))
    for prices in ((1, 0), (0, 1), (1, 1)):
        choice = Cutter(CutProblem(values, frozenset({2}))).cut(*prices)
        assert (choice.saved, choice.recomputed) == ({1}, {2})


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    values = []
    for index in range(draw(st.integers(1, 6))):
        inputs = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        size = draw(st.sampled_from([None, 0, 1, 2, 5, 8]))
        cost = draw(st.sampled_from([None, 0, 1, 3, 10]))
        if size is None and cost is None:
            cost = 1
        values.append(Value(tuple(sorted(inputs)), size, cost))
    needed = draw(st.sets(st.integers(0, len(values) - 1), min_size=1))
    return CutProblem(tuple(values), frozenset(needed))


def everything(problem: CutProblem) -> list[tuple[int, int]]:
    """(bytes, cost) of every way to have what is needed: nothing, saved or recomputed each."""
    found = []
    for states in product("-sr", repeat=len(problem.values)):
        pairs = list(zip(states, problem.values, strict=True))
        if any(states[index] == "-" for index in problem.needed):
            continue
        if any(state == "s" and value.size is None for state, value in pairs):
            continue
        if any(
            state == "r" and (value.cost is None or any(states[i] == "-" for i in value.inputs))
            for state, value in pairs
        ):
            continue
        size = sum(value.size or 0 for state, value in pairs if state == "s")
        found.append((size, sum(value.cost or 0 for state, value in pairs if state == "r")))
    return found


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 4), st.integers(0, 4))
def test_no_choice_is_better(problem: CutProblem, per_byte: int, per_cost: int) -> None:
    choice = Cutter(problem).cut(per_byte, per_cost)
    best = min(per_byte * size + per_cost * cost for size, cost in everything(problem))
    assert per_byte * choice.size + per_cost * choice.cost == best
    available = choice.saved | choice.recomputed
    assert problem.needed <= available
    assert all(set(problem.values[i].inputs) <= available for i in choice.recomputed)
    assert all(problem.values[i].cost is not None for i in choice.recomputed)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_frontier_is_the_lower_hull_of_everything(problem: CutProblem) -> None:
    frontier = Cutter(problem).frontier(32)
    every = everything(problem)
    assert frontier[0].cost == min(cost for _, cost in every)
    assert frontier[-1].size == min(size for size, _ in every)
    for left, right in pairwise(frontier):
        assert left.size > right.size
        assert left.cost < right.cost
        a, b = right.cost - left.cost, left.size - right.size
        assert min(a * size + b * cost for size, cost in every) == a * left.size + b * left.cost
