"""Four ranks train like one process on all four batches, within the rounding of a sum."""

from __future__ import annotations

import parity
import pytest
from models import CASES
from ranks import run_ranks


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(parity.compare, 4, tuple(CASES), {}, timeout=400)


@pytest.mark.parametrize("name", CASES)
def test_model_trains_as_in_one_process(outcomes, name):
    for of_rank in outcomes:
        parity.check(of_rank[name])
