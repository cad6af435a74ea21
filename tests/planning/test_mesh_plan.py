"""Meshes of two dimensions and partial reshard in plans, schedules and the rules on programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_programs as toys
from models import CASES
from toy_programs import events

import graphshard
from graphshard.errors import PassError, PlanError, PolicyError, VerifyError
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.partial_reshard import PartialReshard
from graphshard.passes.reduce_grads import ReduceGrads
from graphshard.passes.reduce_replicas import ReduceReplicas
from graphshard.passes.regather import Regather
from graphshard.passes.sink_waits import SinkWaits
from graphshard.passes.unshard import Unshard
from graphshard.pipeline import run_passes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.storages import live_unsharded
from graphshard.program.text import full_text, schedule_text

GPT = CASES["gpt"]
HYBRID = {"strategy": "HYBRID_SHARD"}


def planned(mesh: tuple[int, ...], **fields: Any) -> graphshard.ShardingPlan:
    policy = graphshard.BlockPolicy(GPT.blocks, **fields)
    return graphshard.plan(GPT.model(), policy, mesh_shape=mesh)


# -- plans --------------------------------------------------------------------------------------


def test_shards_are_those_of_the_last_dimension() -> None:
    plan = planned((2, 8), **HYBRID)
    assert (plan.world_size, plan.shard_size, plan.replicas) == (16, 8, 2)
    assert {layout.world_size for layout in plan.layouts.values()} == {8}
    alone = planned((8,))
    assert (alone.world_size, alone.shard_size, alone.replicas) == (8, 8, 1)
    assert plan.layouts == alone.layouts
    data = plan.to_dict()
    assert (data["mesh_shape"], data["shard_size"], data["replicas"]) == ([2, 8], 8, 2)
    assert "sharding  HYBRID_SHARD, world size 16, mesh 2 x 8 (replicate x shard)" in str(plan)


@pytest.mark.parametrize(
    ("mesh", "fields", "error", "said"),
    [
        ((2, 8), {}, PolicyError, r"FULL_SHARD of unit \(root\).*or use HYBRID_SHARD to shard"),
        ((2, 8), {"strategy": "ZERO2"}, PolicyError, "or use HYBRID_SHARD_ZERO2 to shard"),
        ((16,), HYBRID, PolicyError, r"needs a mesh of two dimensions.*or use FULL_SHARD"),
        (None, HYBRID, PolicyError, r"pass mesh_shape=\(replicas, ranks to shard over\)"),
        ((2, 2, 2), HYBRID, PlanError, "one dimension, or two"),
        ((4,), {"reshard_after_forward": 3}, PlanError, "groups of 3 ranks.*the 4 ranks.*divisor"),
        ((4,), {"reshard_after_forward": 8}, PlanError, "groups of 8 ranks.*the 4 ranks"),
        ((2, 4), HYBRID | {"reshard_after_forward": 8}, PlanError, "the 4 ranks it is sharded"),
    ],
)
def test_what_does_not_fit(mesh: Any, fields: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        planned(mesh, **fields)


def test_groups_for_partial_reshard() -> None:
    plan = planned((8,), reshard_after_forward=2)
    assert [unit.options.reshard for unit in plan.units] == [False, 2, 2]
    assert [unit["options"]["reshard"] for unit in plan.to_dict()["units"]] == [False, 2, 2]
    kept = sum(layout.over(2).shard_bytes for u in plan.units[1:] for layout in u.layouts)
    assert kept == 4 * 14_448 // 2  # of 14,448 elements
    assert (
        "resharded: blocks.0-1 to groups of 2 ranks, each rank keeping up to 28.22 KiB between "
        "forward and backward"
    ) in str(plan)
    root = planned((8,), reshard_after_forward=4, reshard_root=True)
    assert [unit.options.reshard for unit in root.units] == [4, 4, 4]


def test_groups_by_unit() -> None:
    policy = graphshard.ModulePolicy(
        {"blocks.0": {"reshard_after_forward": 2}, "blocks.1": {"reshard_after_forward": 4}}
    )
    plan = graphshard.plan(GPT.model(), policy, world_size=8, example_kwargs=GPT.inputs(0))
    assert plan.program is not None
    ranks = {
        (node.kwargs["unit"], node.kwargs["ranks"])
        for node in plan.program.nodes()
        if "ranks" in node.kwargs
    }
    assert ranks == {("blocks.0", 2), ("blocks.1", 4)}
    assert "resharded: blocks.0 to groups of 2 ranks" in str(plan)
    assert "resharded: blocks.1 to groups of 4 ranks" in str(plan)


def test_groups_of_all_ranks_and_of_one() -> None:
    assert [u.options.reshard for u in planned((4,), reshard_after_forward=4).units] == [
        False,
        True,
        True,
    ]
    plan = planned((4,), reshard_after_forward=1)
    assert [u.options.reshard for u in plan.units] == [False, False, False]
    (warning,) = plan.warnings
    assert warning.startswith("units blocks.0, blocks.1 are kept unsharded between forward and b")


# -- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "mesh"),
    [
        ("hybrid", HYBRID, (2, 2)),
        ("hybrid_zero2", {"strategy": "HYBRID_SHARD_ZERO2"}, (2, 2)),
        ("partial_reshard", {"reshard_after_forward": 2}, (4,)),
        ("hybrid_partial_reshard", HYBRID | {"reshard_after_forward": 2}, (2, 4)),
    ],
)
def test_schedule_dump(name: str, fields: Any, mesh: tuple[int, ...], golden: Any) -> None:
    program, _ = toys.rewritten(toys.blocks, Policy(**fields), mesh=mesh)
    golden(f"schedule_{name}.txt", schedule_text(program))


def test_full_dump(golden: Any) -> None:
    policy = Policy(strategy="HYBRID_SHARD", reshard_after_forward=2)
    program, _ = toys.rewritten(toys.odd_params, policy, mesh=(2, 4))
    golden("full_hybrid_partial_reshard.txt", full_text(program))


def test_more_reduces_in_flight_keep_averages_behind_their_waits() -> None:
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks], Policy(**HYBRID), mesh=(2, 2))
    passes = (Unshard(), Regather(), ReduceGrads(), ReduceReplicas(), SinkWaits(2), InsertFree())
    run_passes(program, plan, passes)
    backward = events(program, waits=True).split(" | ")[1]
    assert backward.endswith(
        "B0 FREE:0 WAIT:2 AR:2 RS:0 WAIT:1 AR:1 FREE:root RS:root WAIT:0 AR:0 WAIT:root AR:root "
        "WAIT:2 WAIT:1 WAIT:0 WAIT:root"
    )


@pytest.mark.parametrize("mesh", [(1, 4), (4,)])
def test_one_replica_is_averaged_with_no_other(mesh: tuple[int, ...]) -> None:
    strategy = "HYBRID_SHARD" if len(mesh) == 2 else "FULL_SHARD"
    program, _ = toys.rewritten(toys.odd_params, Policy(strategy=strategy), mesh=mesh)
    assert "AR" not in events(program).replace("AR:a", "").replace("AR:root", "")
    assert all(ops.group_of(n) == ops.SHARD for n in program.nodes() if ops.is_collective(n))


def test_parts_are_kept_by_the_last_forward_run() -> None:
    program, _ = toys.rewritten(toys.back_and_forth, Policy(reshard_after_forward=2))
    kept = [(event.op, event.unit) for event in program.schedule() if event.phase == "forward"]
    assert [e for e in kept if e[0] in ("reshard", "free")] == [
        ("free", "a"),
        ("reshard", "b"),
        ("free", "b"),
        ("reshard", "a"),
        ("free", "a"),
        ("free", ""),
    ]


def test_nothing_is_kept_without_a_backward() -> None:
    program, _ = toys.rewritten(toys.blocks, Policy(reshard_after_forward=2), grad=False)
    assert not any(node.target is ops.reshard for node in program.nodes())


def test_parts_count_as_long_as_they_are_kept() -> None:
    policy = Policy(reshard_after_forward=2)
    program, plan = toys.rewritten(toys.blocks, policy)
    live = dict(live_unsharded(program))
    # The root, and of each of three blocks one of two parts.
    root = plan.unit("").unsharded_bytes
    part = sum(x.over(2).shard_bytes for x in plan.unit("layers.0").layouts)
    assert live[program.first_backward().prev] == root + 3 * part
    assert live[program.output_node.prev] == 0
    # And in what a step holds at once, which a budget bounds.
    said = r"unsharded parameters 1\.69 KiB: \(root\) 576 B, layers\.1 576 B"
    with pytest.raises(VerifyError, match=said):
        toys.rewritten(toys.blocks, Policy(reshard_after_forward=2, memory_budget=1))


# -- rules --------------------------------------------------------------------------------------


def test_passes_refuse_what_they_cannot_rewrite() -> None:
    program, plan = toys.rewritten(toys.blocks, Policy(**HYBRID), mesh=(2, 2))
    with pytest.raises(PassError, match="before it is averaged over the replicas; run the pass on"):
        ReduceReplicas().apply(program, plan)
    program = toys.blocks()
    policy = Policy(reshard_after_forward=2)
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks], policy)
    with pytest.raises(PassError, match="which no gather in forward has"):
        run_passes(program, plan, (PartialReshard(),))


def test_recomputed_units_are_gathered_from_their_parts() -> None:
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy(
        GPT.blocks, reshard_after_forward=2, recompute="units", merge_below=0
    )
    plan = graphshard.plan(GPT.model(), policy, world_size=4, example_kwargs=GPT.inputs(0))
    assert plan.program is not None
    backward = [n for n in plan.program.nodes("backward") if n.target is ops.all_gather]
    assert [ops.group_of(node) for node in backward] == ["reshard", "reshard"]
