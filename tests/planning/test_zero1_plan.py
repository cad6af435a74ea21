"""SHARD_OPTIMIZER planned: what a rank stores, what a program gathers, what is refused."""

from __future__ import annotations

import pytest
import torch
from layouts import Experts, MoE

import graphshard
from graphshard.errors import PolicyError
from graphshard.planning.planner import make_plan
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.units import BlockPolicy
from graphshard.program import ops
from graphshard.program.storages import live_unsharded
from graphshard.program.text import full_text


def meta(*blocks):
    with torch.device("meta"):
        return MoE(*blocks), (torch.zeros(6, dtype=torch.int64),) * 2


def planned(world_size=4, **fields):
    model, inputs = meta()
    policy = BlockPolicy({Experts}, strategy="SHARD_OPTIMIZER", merge_below=0, **fields)
    return graphshard.plan(model, policy, world_size=world_size, example_inputs=inputs)


def gathers(program):
    return [node for node in program.nodes() if node.target is ops.all_gather]


def test_the_plan_counts_what_a_rank_stores():
    model, _ = meta()
    plan = make_plan(model, BlockPolicy({Experts}, strategy="ZeRO-1"), world_size=8)
    layout = plan.layouts["embed.weight"]
    assert (layout.resident, layout.shard_shape) == (True, (3, 128))
    assert layout.shard_bytes == layout.full_bytes == 24 * 128 * 4
    root = plan.unit("")
    assert root.sharded_bytes == root.unsharded_bytes
    assert "SHARD_OPTIMIZER, world size 8" in str(plan)


def test_a_part_along_another_dim_lies_behind_the_whole():
    model, _ = meta()
    plan = make_plan(model, BlockPolicy({Experts}, strategy="SHARD_OPTIMIZER"), world_size=4)
    layout = plan.layouts["blocks.0.w"]
    assert (layout.dim, layout.resident) == (1, True)
    assert layout.shard_bytes == 4 * layout.numel + 4 * layout.shard_numel


def test_the_program_after_a_step(golden):
    program = planned(2).program
    golden("schedule_zero1.txt", str(program))
    assert [node.kwargs["in_place"] for node in gathers(program)] == [True, True, True]
    assert "norm.weight" not in {p for node in gathers(program) for p in node.kwargs["params"]}
    assert {live for _, live in live_unsharded(program)} == {0}
    assert "in_place=True" in full_text(program)
    assert not [node for node in program.nodes() if node.target is ops.free]


def test_one_rank_gathers_nothing():
    assert gathers(planned(1).program) == []


def test_a_unit_may_be_of_that_kind_beside_others():
    model, inputs = meta()
    policy = ModulePolicy({"blocks.1": {"strategy": "SHARD_OPTIMIZER"}}, BlockPolicy({Experts}))
    program = graphshard.plan(model, policy, world_size=2, example_inputs=inputs).program
    by_unit = {node.kwargs["unit"]: node.kwargs.get("in_place", False) for node in gathers(program)}
    assert by_unit == {"": False, "blocks.0": False, "blocks.1": True}
    freed = {e.unit for e in program.schedule() if e.op == "free"}
    assert freed == {"", "blocks.0"}


@pytest.mark.parametrize(
    ("fields", "modules", "said"),
    [
        ({"offload": "params"}, {}, "unit .root.: strategy SHARD_OPTIMIZER keeps whole"),
        ({"mixed_precision": MixedPrecision(torch.bfloat16)}, {}, "a param_dtype of mixed"),
        ({"reshard_after_forward": True}, {}, "SHARD_OPTIMIZER keeps parameters"),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields, modules, said):
    model, _ = meta()
    with pytest.raises(PolicyError, match=said):
        make_plan(model, ModulePolicy(modules, strategy="SHARD_OPTIMIZER", **fields), world_size=2)
