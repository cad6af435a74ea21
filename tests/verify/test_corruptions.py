"""Every kind of corruption of a finished program is refused by its rule, or changes no number."""

from __future__ import annotations

from functools import cache

import pytest
from corruption_kinds import HARMLESS, KINDS, Kind
from corruption_programs import SETTINGS, sample
from corruption_runs import Bench
from corruptions import chosen, count, outcome, rule_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from graphshard.errors import VerifyError
from graphshard.program import ops

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
MAY_BE_HARMLESS = [kind for kind in KINDS if HARMLESS in kind.rules]


def check(kind: Kind, *, programs: int, each: int) -> None:
    places = list(chosen(kind, programs=programs, each=each))
    assert places, "no program has a place for this corruption"
    for setting, index in places:
        rule, text = outcome(setting, kind, index)
        assert rule in kind.rules, f"{setting}, place {index}: {rule}\n{text}"


@by_kind
def test_the_rule_of_its_row_refuses_it(kind: Kind) -> None:
    check(kind, programs=2, each=1)


@pytest.mark.slow
@by_kind
def test_in_every_program_at_several_places(kind: Kind) -> None:
    check(kind, programs=len(SETTINGS), each=3)


def test_the_programs_have_every_op_and_the_table_every_kind_once() -> None:
    used = {node.target for name in SETTINGS for node in sample(name).program.nodes()}
    assert used >= ops.VOCABULARY
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names))
    for op in ops.OPS.values():
        assert f"{op.name} deleted" in names
        assert f"{op.name} done twice" in names


@pytest.mark.parametrize("setting", ["full", "mixed added", "hybrid", "dynamic"])
def test_a_copy_is_as_valid_as_its_original(setting: str) -> None:
    """A fault of the harness would otherwise count as a refusal."""
    sample(setting).copy().verify()


@cache
def bench(setting: str) -> Bench:
    """The model on one rank in this process."""
    return Bench.of(setting, steps=1, accumulate=False)


def changed(on: Bench, kind: Kind, number: int) -> list[str] | None:
    """The numbers that an accepted corruption changes; None if it is refused or has no place."""
    try:
        return on.differences(kind.places, kind.edit, number)
    except VerifyError as error:
        rule, text = rule_of(error), str(error)
    assert rule in kind.rules, text
    return None


def test_what_is_accepted_changes_no_number() -> None:
    ran = {kind.name for kind in MAY_BE_HARMLESS if changed(bench("full"), kind, 5) == []}
    assert {"a gather issued earlier", "a wait later", "a value cloned"} <= ran


def test_numbers_that_change_are_seen() -> None:
    """The comparison itself: an output doubled without a check differs."""
    on = bench("full")
    kind = next(kind for kind in KINDS if kind.name == "an output doubled where it is returned")
    with pytest.raises(VerifyError):
        on.differences(kind.places, kind.edit, 0)
    on.corruption.changes_values = True
    try:
        assert "step 0 last output 0" in (on.differences(kind.places, kind.edit, 0) or [])
    finally:
        on.corruption.changes_values = False


@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(KINDS), st.integers(0, 10_000))
def test_a_random_corruption_is_refused_or_harmless(kind: Kind, number: int) -> None:
    assert changed(bench("full"), kind, number) in (None, [])


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from([*SETTINGS]), st.sampled_from(KINDS), st.integers(0, 10_000))
def test_a_random_corruption_of_any_program(setting: str, kind: Kind, number: int) -> None:
    places = count(setting, kind)
    assume(places)
    rule, text = outcome(setting, kind, number % places)
    assert rule in kind.rules, text


def harmless_on_ranks(setting: str) -> None:
    on = Bench.of(setting, steps=2, accumulate=True)
    made = {kind.name: changed(on, kind, 3) for kind in MAY_BE_HARMLESS}
    assert {name: numbers for name, numbers in made.items() if numbers} == {}
    assert [*made.values()].count([]) >= 8


def full(rank: int) -> None:
    harmless_on_ranks("full")


def zero1(rank: int) -> None:
    harmless_on_ranks("zero1")


def mixed(rank: int) -> None:
    harmless_on_ranks("mixed")


def offload(rank: int) -> None:
    harmless_on_ranks("offload")


def recompute(rank: int) -> None:
    harmless_on_ranks("recompute")


ON_TWO = [full, zero1, mixed, offload, recompute]

test_on_two_ranks = pytest.mark.slow(on_ranks(ON_TWO, 2, timeout=900.0))


def partial(rank: int) -> None:
    harmless_on_ranks("partial")


test_on_four_ranks = pytest.mark.slow(on_ranks([partial], 4, timeout=900.0))
