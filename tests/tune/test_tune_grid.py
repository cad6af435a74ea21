"""The benchmark of `AutoPolicy` against grids: it simulates a plan once."""

from __future__ import annotations

from dataclasses import replace

from tuning import OPEN, gpt

from examples.benchmarks.tune_grid import Case, Grid, sample
from graphshard import BlockPolicy, SizePolicy
from graphshard.policy.tree import ModuleTree


def test_a_plan_is_simulated_once():
    model, inputs = gpt(layers=1)
    block = BlockPolicy({"Block"})
    numel = ModuleTree(model).numel_below()
    same = [block, SizePolicy(numel["blocks.0"])]
    wrong = replace(block, strategy="HYBRID_SHARD")  # on a mesh of one dimension
    grid = Grid(Case(model, inputs, OPEN, ranks=4))
    grid.simulate([*same, wrong])
    assert grid.simulator.simulated == 1
    one, other = (grid.results[repr(policy)] for policy in same)
    assert one == other is not None
    assert grid.results[repr(wrong)] is None
    assert grid.best(1 << 40) == (repr(block), one)
    assert grid.memory(same) == [one[1]] * 3


def test_a_sample_is_random_and_always_the_same():
    policies = [BlockPolicy({"Block"}, forward_prefetch=distance) for distance in range(100)]
    chosen = sample(policies, 10)
    assert len(chosen) == 10
    assert chosen == sample(policies, 10)
    assert {policy.forward_prefetch % 10 for policy in chosen} != {0}
