"""Programs that use different units issue the same collectives."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations
from typing import Any

import pytest
import toy_programs as toys
from toy_programs import BATCH, VOCAB, WIDTH, Toy

from graphshard import PolicyError
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.pipeline import passes_for, passes_of, run_passes, with_capture_warnings
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.program import BACKWARD, Program
from graphshard.runtime.calls import Fingerprint
from graphshard.verify.rules import verify

UNITS = ("a", "b", "b.inside", "c")


def program_of(used: Collection[str], *, grad: bool = True, inside_first: bool = False) -> Program:
    """One that uses some of the units, of which one is inside another."""
    params = {"embed.weight": (VOCAB, WIDTH)}
    for unit in UNITS:
        params |= toys.block_params(unit)
    toy = Toy(params | {"mix.weight": (WIDTH, WIDTH), "head.weight": (VOCAB, WIDTH)})
    if grad:
        toy.tangent(BATCH, VOCAB)
    x = toy.embedding("embed.weight")
    if "a" in used:
        x = toy.block(x, "a")
    if "c" in used:  # a parameter of the root
        x = toy.linear(x, "mix.weight")
    inside = "b.inside" in used
    if inside and (inside_first or "b" not in used):
        x = toy.block(x, "b.inside")
    if "b" in used:
        x = toy.linear(x, "b.up.weight")
        if inside and not inside_first:
            x = toy.linear(toy.relu(x, "b"), "b.down.weight")
            x = toy.relu(toy.block(x, "b.inside"), "b")
        else:
            x = toy.linear(toy.relu(x, "b"), "b.down.weight")
    if "c" in used:
        x = toy.block(x, "c")
    return toy.finish(toy.linear(x, "head.weight"), grad=grad)


def sharded(program: Program, mode: Any = (None, (), ()), **fields: Any) -> ShardingPlan:
    mesh = (2, 2) if str(fields.get("strategy", "")).startswith("HYBRID") else (4,)
    policy = Policy(gather_unused=True, **fields)
    plan = toys.make_toy_plan(program, ["", *UNITS], policy, mesh=mesh)
    run_passes(program, plan, passes_for(passes_of(plan), mode))
    return plan


SUBSETS = list(chain.from_iterable(combinations(UNITS, n) for n in range(len(UNITS) + 1)))


@pytest.mark.parametrize(
    "fields",
    [
        {"merge_below": 0},
        {"merge_below": 300},
        {"merge_below": 1 << 20},
        {"merge_below": 1 << 20, "reshard_root": True},
        {"strategy": "SHARD_OPTIMIZER", "merge_below": 1 << 20},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "SHARD_OPTIMIZER"},
        {"strategy": "NO_SHARD"},
        {"strategy": "HYBRID_SHARD", "backward_prefetch": None},
        {"reshard_root": True, "forward_prefetch": 2, "merge_below": 0},
        {"reshard_after_forward": 2, "backward_prefetch": "post"},
        {"offload": "params", "merge_below": 0},
        {"recompute": "units", "merge_below": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("inside_first", [False, True])
def test_the_collectives_do_not_depend_on_what_is_used(
    fields: dict[str, Any], inside_first: bool
) -> None:
    found = set()
    for used in SUBSETS:
        program = program_of(used, inside_first=inside_first)
        plan = sharded(program, **fields)
        found.add(Fingerprint.of(program.graph, plan))
        grads = program.results().grads
        assert all(map(ops.is_reduced, grads)), "each rank has a part of each gradient"
    assert len(found) == 1


def test_nor_do_those_of_a_forward_alone() -> None:
    found = set()
    for used in SUBSETS:
        program = program_of(used, grad=False)
        found.add(Fingerprint.of(program.graph, sharded(program, merge_below=0)))
    ((only,),) = [found]
    assert [line.split(" over ")[0] for line in only.lines] == [
        f"forward all_gather of {unit}" for unit in ("(root)", *UNITS)
    ]


@pytest.mark.parametrize(
    "fields", [{"merge_below": 1000}, {"merge_below": 0}, {"strategy": "HYBRID_SHARD"}], ids=str
)
def test_an_output_without_a_gradient_changes_no_collective(fields: dict[str, Any]) -> None:
    program = program_of(["a", "b"])
    plan = sharded(program, **fields)
    before = Fingerprint.of(program.graph, plan)
    drop = DropUnusedTangents(frozenset({0}))
    drop.apply(program, plan)
    verify(program, plan, after=drop.name)
    assert Fingerprint.of(program.graph, plan) == before
    assert all(map(ops.is_reduced, program.results().grads))
    products = [node for node in program.nodes(BACKWARD) if node.target is toys.aten.mm.default]
    assert not products


@pytest.mark.parametrize("gather_unused", [False, True])
def test_what_a_call_does_not_use_is_no_reason_to_warn(gather_unused: bool) -> None:
    program = program_of(["a"])
    policy = Policy(gather_unused=gather_unused)
    plan = toys.make_toy_plan(program, ["", *UNITS], policy)
    warned = with_capture_warnings(plan, program).warnings != plan.warnings
    assert warned is not gather_unused


def test_within_no_sync_zeros_are_not_accumulated() -> None:
    program = program_of(["a"])
    sharded(program, mode=("gradient", (), ()))
    kept = [node.kwargs["param"] for node in program.nodes() if node.target is ops.accumulate_grad]
    assert kept
    assert all(name.partition(".")[0] in ("a", "embed", "head") for name in kept)


@pytest.mark.parametrize(
    "fields",
    [{"schedule": "overlap"}, {"cuda_graph": True}, {"check_finite": "warn"}],
    ids=str,
)
def test_what_needs_one_program_on_all_ranks_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="gather_unused"):
        Policy(gather_unused=True, **fields)
