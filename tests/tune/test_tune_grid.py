"""The benchmark of `AutoPolicy` against grids: it simulates a plan once, and keeps the results."""

from __future__ import annotations

import json
from dataclasses import replace

from tuning import OPEN, gpt

from examples.benchmarks.tune_grid import Case, Grid, sample
from graphshard import BlockPolicy, SizePolicy
from graphshard.policy.tree import ModuleTree


def test_a_plan_is_simulated_once_and_a_cache_spares_all(tmp_path):
    model, inputs = gpt(layers=1)
    case = Case(model, inputs, OPEN, ranks=4)
    block = BlockPolicy({"Block"})
    numel = ModuleTree(model).numel_below()
    same = [block, SizePolicy(numel["blocks.0"])]
    wrong = replace(block, strategy="HYBRID_SHARD")  # on a mesh of one dimension
    cache = tmp_path / "folder" / "case.jsonl"
    grid = Grid(case, cache)
    grid.simulate([*same, wrong])
    assert grid.simulator.simulated == 1
    one, other = (grid.results[repr(policy)] for policy in same)
    assert one == other is not None
    assert grid.results[repr(wrong)] is None
    assert [json.loads(line)["policy"] for line in cache.read_text().splitlines()] == [
        repr(policy) for policy in (*same, wrong)
    ]
    again = Grid(case, cache)
    again.simulate([*same, wrong])
    assert again.simulator.simulated == 0
    assert again.results == grid.results
    assert again.best(1 << 40) == grid.best(1 << 40) == (repr(block), one)
    assert again.memory(same) == [one[1]] * 3
    cached = Grid(case, cache, only_cached=True)
    cached.simulate([replace(block, strategy="SHARD_GRAD_OP")])
    assert cached.results == grid.results


def test_a_sample_is_random_and_always_the_same():
    policies = [BlockPolicy({"Block"}, forward_prefetch=distance) for distance in range(100)]
    chosen = sample(policies, 10)
    assert len(chosen) == 10
    assert chosen == sample(policies, 10)
    assert {policy.forward_prefetch % 10 for policy in chosen} != {0}
