"""The fuzzer itself, and a handful of its seeds; `make fuzz` plays more."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
from fuzz import fails, judged, verdict
from fuzz_blocks import KINDS
from fuzz_case import Case
from fuzz_draw import draw
from fuzz_minimise import minimise
from fuzz_pair import Pair
from fuzz_play import EQUAL, MISMATCH, REFUSED, SKIPPED, Outcome
from fuzz_policies import policy_of
from fuzz_protocol import STEPS
from fuzz_sides import OPTIMIZERS

import graphshard
from graphshard.policy.base import Policy

DRAWN = [draw(seed) for seed in range(3000)]


def test_a_seed_draws_one_case_which_its_text_holds() -> None:
    for seed, case in enumerate(DRAWN[:200]):
        assert draw(seed) == case
        assert str(Case.parse(str(case))) == str(case)
    with pytest.raises(ValueError, match="a case has no blokcs"):
        Case.parse('{"seed": 1, "blokcs": []}')


def test_every_block_step_and_optimizer_is_drawn() -> None:
    assert len(KINDS) >= 60
    assert KINDS.keys() <= {name for case in DRAWN for name in case.blocks}
    assert STEPS.keys() == {name for case in DRAWN for name in case.steps}
    assert OPTIMIZERS.keys() <= {case.optimizer for case in DRAWN}
    compiled = sum(case.backend == "inductor" for case in DRAWN)
    assert 0.3 < compiled / len(DRAWN) < 0.37


def test_every_field_of_a_policy_is_drawn() -> None:
    drawn = {name for case in DRAWN for name in case.policy}
    assert {field.name for field in fields(Policy)} <= drawn
    strategies = {case.policy.get("strategy", "FULL_SHARD") for case in DRAWN}
    assert strategies == {str(strategy) for strategy in graphshard.Strategy}
    precision = {n for case in DRAWN for n in case.policy.get("mixed_precision", ())}
    assert precision == {field.name for field in fields(graphshard.MixedPrecision)}


def test_drawn_policies_do_not_contradict_themselves() -> None:
    for case in DRAWN[:500]:
        policy_of(case.policy)


def test_a_failing_case_is_made_as_small_as_it_can_be() -> None:
    case = next(c for c in DRAWN if "views" in c.blocks and "clip" in c.steps)

    def play(candidate: Case) -> Outcome:
        wrong = "views" in candidate.blocks and "clip" in candidate.steps
        return Outcome(MISMATCH if wrong else EQUAL)

    smallest, outcome = minimise(case, play(case), play)
    assert fails(outcome)
    plain = Case(seed=case.seed, dim=case.dim, blocks=("views",), steps=("clip",))
    assert str(smallest) == str(plain)


def test_the_verdict_is_that_of_the_worst_rank() -> None:
    assert verdict([Outcome(EQUAL, exact=True), Outcome(EQUAL)]) == Outcome(EQUAL)
    assert verdict([Outcome(EQUAL), Outcome(MISMATCH, "step 0")]).kind == MISMATCH
    assert "ranks differ" in verdict([Outcome(EQUAL), Outcome(REFUSED, "build", "no")]).what


@pytest.fixture(scope="module")
def pair():
    started = Pair()
    yield started
    started.stop()


def test_a_mismatch_where_rounding_alone_leads_to_one_is_no_failure() -> None:
    class Played:
        def __init__(self, alone: Outcome) -> None:
            self.alone = alone

        def play(self, case: Case, *, eager: bool = False) -> list[Outcome]:
            return [self.alone if eager else Outcome(MISMATCH, "step 2 (train)", "0.1")] * 2

    for alone, kind in (
        (Outcome(MISMATCH, "step 1 (train)", "0.2"), SKIPPED),
        (Outcome(MISMATCH, "step 3 (train)", "0.2"), MISMATCH),
        (Outcome(EQUAL), MISMATCH),
    ):
        assert judged(Played(alone), DRAWN[0]).kind == kind


def require(pair: Pair, cases: list[Case]) -> None:
    """Play the cases; each must be equal, or refused with an error of graphshard's own."""
    outcomes = {str(case): judged(pair, case) for case in cases}
    failed = {text: str(outcome) for text, outcome in outcomes.items() if fails(outcome)}
    assert not failed, "\n".join(
        f"make fuzz CASE='{text}'\n{what}" for text, what in failed.items()
    )
    counts = Counter(outcome.kind for outcome in outcomes.values())
    assert counts[EQUAL] >= 0.7 * len(cases), counts


@pytest.mark.slow
def test_a_few_cases(pair: Pair) -> None:
    """Small ones, of all strategies, which the same ranks play."""
    pairs = [case for case in DRAWN if case.ranks == 2]
    cases: list[Case] = []
    for strategy in graphshard.Strategy:
        alike = [case for case in pairs if case.policy.get("strategy", "FULL_SHARD") == strategy]
        small = [case for case in alike if len(case.blocks) < 3 and len(case.steps) == 3]
        cases.append(next(case for case in small if case.backend == "eager" and not case.mixed))
    require(pair, cases)


def test_resident_parameters_after_a_rank_left(pair: Pair) -> None:
    """What one rank saw of them in a call that failed must not part it from the others."""
    policy = {"kind": "block", "strategy": "SHARD_OPTIMIZER"}
    steps = ("leave", "edit", "freeze", "forwards_in_order")
    blocks = ("hooks", "linear")
    require(pair, [Case(seed=300052, blocks=blocks, root="norm", policy=policy, steps=steps)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_forty_seeds(first: int, pair: Pair) -> None:
    require(pair, DRAWN[first : first + 10])
