"""Rewritten programs compute what captured ones do, on every rank, with freed memory poisoned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import toy_programs as toys
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.policy.units import Policy
from graphshard.program.program import Program

POLICIES = {
    "pre": Policy(),
    "post": Policy(backward_prefetch="post", forward_prefetch=1),
    "none": Policy(backward_prefetch=None, forward_prefetch=3),
    "reshard_root": Policy(reshard_root=True),
    "grad_op": Policy(strategy="SHARD_GRAD_OP", forward_prefetch=1),
    "no_shard": Policy(strategy="NO_SHARD"),
    "hybrid": Policy(strategy="HYBRID_SHARD"),
    "hybrid_zero2": Policy(strategy="HYBRID_SHARD_ZERO2", reshard_root=True),
    "parts": Policy(reshard_after_forward=2),
    "parts_post": Policy(reshard_after_forward=2, reshard_root=True, backward_prefetch="post"),
    "hybrid_parts": Policy(strategy="HYBRID_SHARD", reshard_after_forward=3, forward_prefetch=2),
}
MESHES = {
    "hybrid": (2, 3),
    "hybrid_zero2": (3, 2),
    "parts": (4,),
    "parts_post": (6,),
    "hybrid_parts": (2, 6),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", toys.UNITS, ids=lambda build: build.__name__)
def test_same_values_on_every_rank(build: Callable[[], Program], policy: str) -> None:
    program, plan = toys.rewritten(build, POLICIES[policy], mesh=MESHES.get(policy, (3,)))
    toys.assert_same_values(build(), program, plan)


def test_same_values_on_one_rank() -> None:
    program, plan = toys.rewritten(toys.blocks, world_size=1)
    toys.assert_same_values(toys.blocks(), program, plan)


def test_world_size_changes_only_shards() -> None:
    """A single rank runs the same sequence of events as many."""
    one, _ = toys.rewritten(toys.nested, world_size=1)
    many, _ = toys.rewritten(toys.nested, world_size=16)
    assert one.schedule() == many.schedule()


MODULES = ("root", "a", "a.x", "a.y", "b", "b.x", "c")


@settings(max_examples=60, deadline=None)
@given(
    used=st.lists(st.sampled_from(MODULES), min_size=1, max_size=8),
    units=st.sets(st.sampled_from(MODULES[1:])),
    policy=st.sampled_from(sorted(POLICIES)),
    grad=st.booleans(),
)
def test_any_sequence_of_uses_and_any_units(
    used: list[str], units: set[str], policy: str, grad: bool
) -> None:
    """Modules used in any order, again and again, the units any subset of them."""

    def build() -> Program:
        weights = {f"{module}.weight": (toys.WIDTH, toys.WIDTH) for module in MODULES}
        toy = toys.Toy({"embed.weight": (toys.VOCAB, toys.WIDTH)} | weights)
        if grad:
            toy.tangent(toys.BATCH, toys.WIDTH)
        x = toy.embedding("embed.weight")
        for module in used:
            x = toy.relu(toy.linear(x, f"{module}.weight"), module)
        return toy.finish(x, grad=grad)

    program = build()
    mesh = MESHES.get(policy, (2,))
    plan = toys.make_toy_plan(program, ("", *sorted(units)), POLICIES[policy], mesh=mesh)
    toys.run_passes(program, plan, toys.default_passes(plan.policy))
    toys.assert_same_values(build(), program, plan)
