"""Two ranks train like one process on both batches, bit for bit wherever `fully_shard` does."""

from __future__ import annotations

import parity
import pytest
from models import CASES
from ranks import run_ranks

FULLY_SHARD_IS_EXACT = {"gpt", "llama", "gpt2", "bert", "regnet"}


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(parity.compare, 2, tuple(CASES), {}, timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_model_trains_as_in_one_process(outcomes, name):
    for of_rank in outcomes:
        parity.check(of_rank[name])
        assert of_rank[name].fully_shard.exact == (name in FULLY_SHARD_IS_EXACT)
