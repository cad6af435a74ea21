"""Predicted memory against every live byte counted on real ranks: peak, valley, and on the host."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

from examples.benchmarks.harness import median_interval
from examples.benchmarks.memory_truth import Case, every, row, sample, truth_of, worst


def _truths(rank: int, cases: list[Case]) -> list[Any]:
    return [truth_of(case) for case in cases]


def check(ranks: int, cases: list[Case]) -> None:
    by_rank = run_ranks(_truths, ranks, cases, timeout=60 + 60 * len(cases))
    wrong = [row(truth) for truth in map(worst, zip(*by_rank, strict=True))]
    wrong = [line for line in wrong if line.endswith("WRONG")]
    assert not wrong, "\n".join(wrong)


QUICK = ("full accumulate",)


def test_predicted_bytes_are_those_that_live():
    check(2, [case for case in sample(2) if case.name in QUICK])


@pytest.mark.slow
def test_predicted_bytes_are_those_that_live_with_every_option():
    check(2, [case for case in sample(2) if case.name not in (*QUICK, "full", "zero1")])


@pytest.mark.slow
def test_predicted_bytes_are_those_that_live_on_four_ranks():
    check(4, sample(4))


FIRST = {"llama": 2, "t5": 6, "regnet": 8, "mixtral": 10, "lora": 12}
"""The first case of each model."""


@pytest.mark.slow
@pytest.mark.parametrize("model", FIRST)
def test_a_cross_section_of_every_option(model):
    """Other options of each model; together they have all."""
    cases = [case for case in every(2) if case.model == model and allowed(case)]
    drawn = cases[FIRST[model] :: 19]
    check(2, [case for case in drawn if not needs_more_than_its_budget(case)])


def needs_more_than_its_budget(case: Case) -> bool:
    """On the CPU a copy to the host takes memory itself, so nine tenths may be too few."""
    return case.options.get("recompute") == "budget" and "offload" in case.options


def allowed(case: Case) -> bool:
    """Whether policies allow it: a rank that keeps whole parameters computes with those."""
    zero1 = case.options.get("strategy") == "SHARD_OPTIMIZER"
    return not (zero1 and ("mixed_precision" in case.options or "params" in str(case.options)))


def test_cases_cover_every_option():
    cases = [*every(2), *every(4)]
    seen = {(key, str(value)) for case in cases for key, value in case.options.items()}
    for option in ("strategy", "recompute", "offload", "mixed_precision", "reshard_after_forward"):
        assert any(key == option for key, _ in seen)
    assert {case.mode for case in cases} == {"step", "accumulate", "eval", "dynamic"}
    assert {case.model for case in sample(2)} == {case.model for case in cases}
    assert len({(case.model, case.name) for case in cases}) == len(cases)


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (9, 1, 7), (20, 5, 14), (30, 9, 20)])
def test_interval_of_a_median(count, low, high):
    # Ranks from tables of the sign test at 95 %.
    assert median_interval([float(i) for i in range(count)][::-1]) == (low, high)
