"""Four ranks train like one process on all four batches, within the rounding of a sum."""

from __future__ import annotations

import parity
import pytest
from models import CASES
from ranks import run_ranks

QUICK = ("gpt",)
"""Of all models; the others are in the widest matrix."""


@pytest.fixture(scope="module")
def quick():
    return run_ranks(parity.compare, 4, QUICK, {}, timeout=400)


@pytest.mark.parametrize("name", QUICK)
def test_model_trains_as_in_one_process(quick, name):
    for of_rank in quick:
        parity.check(of_rank[name])


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(parity.compare, 4, tuple(CASES), {}, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_model_trains_as_in_one_process(outcomes, name):
    for of_rank in outcomes:
        parity.check(of_rank[name])
