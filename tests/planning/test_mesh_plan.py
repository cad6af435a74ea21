"""Meshes of two dimensions and partial reshard in plans, schedules and the rules on programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy_programs as toys
from broken_programs import emit, named
from event_order import events
from models import CASES

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
from graphshard.program.program import Program
from graphshard.program.storages import live_unsharded
from graphshard.program.text import full_text, schedule_text
from graphshard.verify.facts import Reference
from graphshard.verify.rules import verify

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


def test_no_shard_fits_any_mesh() -> None:
    plan = planned((2, 4), strategy="NO_SHARD")
    assert not any(layout.sharded for layout in plan.layouts.values())


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


def test_an_average_is_launched_behind_the_next_unit_and_hides_behind_those_after_it() -> None:
    program, _ = toys.rewritten(toys.blocks, Policy(**HYBRID), mesh=(2, 2))
    assert events(program, waits=True).split(" | ")[1] == (
        "AG:2 Bh AG:1 WAIT:2 B2 FREE:2 RS:2 "
        "AG:0 WAIT:1 B1 FREE:1 WAIT:2 AR:2 RS:1 "
        "WAIT:0 B0 FREE:0 WAIT:1 AR:1 RS:0 "
        "WAIT:0 AR:0 FREE:root RS:root WAIT:root AR:root "
        "WAIT:2 WAIT:1 WAIT:0 WAIT:root"
    )


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


def test_replicated_parameters_are_averaged_over_all_ranks() -> None:
    program, _ = toys.rewritten(toys.blocks, Policy(strategy="NO_SHARD"), mesh=(2, 2))
    reduces = [node for node in program.nodes() if ops.is_collective(node)]
    assert {(node.target, ops.group_of(node)) for node in reduces} == {(ops.all_reduce, "all")}


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
    said = r"unsharded parameters 1,728: \(root\) 576, layers\.1 576"
    with pytest.raises(VerifyError, match=said):
        toys.rewritten(toys.blocks, Policy(reshard_after_forward=2, memory_budget=1))


# -- rules --------------------------------------------------------------------------------------


def average_of_one_group(program: Program) -> None:
    """A shard's gradient is returned as its own group averaged it."""
    average = named(program, "layers_1_all_reduce")
    wait = next(iter(average.users))
    shards = average.args[0]
    results = program.results()
    for index, grad in enumerate(results.grads):
        if grad is not None and grad.args[0] is wait:
            results.grads[index] = shards[grad.args[1]]
    program.set_results(results)
    for node in [*wait.users, wait, average]:
        program.graph.erase_node(node)


def average_of_another_shard(program: Program) -> None:
    average = named(program, "root_all_reduce")
    average.args = (average.args[0][::-1],)


def average_of_a_full_gradient(program: Program) -> None:
    average, reduce = named(program, "root_all_reduce"), named(program, "root_reduce_scatter")
    average.args = (list(reduce.args[0]),)


def average_within_the_shards(program: Program) -> None:
    average = named(program, "layers_1_all_reduce")
    average.kwargs = {**average.kwargs, "group": "shard"}


def average_twice(program: Program) -> None:
    average = named(program, "layers_1_all_reduce")
    wait = next(iter(average.users))
    with program.graph.inserting_after(wait):
        again = program.graph.node_copy(average)
    again.meta = dict(average.meta)
    emit(program, again, ops.wait, again, like=wait)


def average_before_its_shards(program: Program) -> None:
    reduce = named(program, "layers_1_reduce_scatter")
    reduce.append(named(program, "layers_1_all_reduce"))


def reordered_averages(program: Program) -> None:
    first = named(program, "layers_1_all_reduce")
    named(program, "layers_0_all_reduce").append(first)


def gather_over_the_replicas(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    gather.kwargs = {**gather.kwargs, "group": "replicate"}


def returned_before_the_average(program: Program) -> None:
    average = named(program, "layers_1_all_reduce")
    wait = next(iter(average.users))
    results = program.results()
    for index, grad in enumerate(results.grads):
        if grad is not None and grad.args[0] is wait:
            results.grads[index] = average.args[0][grad.args[1]]
    program.set_results(results)


def other_groups_than_planned(program: Program) -> None:
    part = named(program, "layers_1_up_weight_part")
    part.kwargs = {**part.kwargs, "ranks": 4}


def other_groups_throughout(program: Program) -> None:
    for node in program.nodes():
        if "ranks" in node.kwargs:
            node.kwargs = {**node.kwargs, "ranks": 4}


def part_of_another_parameter(program: Program) -> None:
    part = named(program, "layers_1_up_weight_part")
    part.kwargs = {**part.kwargs, "param": "layers.1.down.weight"}


def part_of_a_shard(program: Program) -> None:
    part = named(program, "layers_1_up_weight_part")
    part.args = (next(p.node for p in program.params if p.fqn == "layers.1.up.weight"),)


def part_read_whole(program: Program) -> None:
    part = named(program, "layers_1_up_weight_part")
    emit(program, part, toys.aten.t.default, part, like=part)


def part_taken_after_the_free(program: Program) -> None:
    free = named(program, "layers_1_free")
    free.append(named(program, "layers_1_up_weight_part"))


def part_of_the_wrong_size(program: Program) -> None:
    part = named(program, "layers_1_up_weight_part")
    part.meta["val"] = part.meta["val"].new_empty((1, toys.WIDTH))


def swapped_parts(program: Program) -> None:
    gather = named(program, "layers_1_all_gather_1")
    gather.args = (gather.args[0][::-1],)


def parts_gathered_among_all(program: Program) -> None:
    gather = named(program, "layers_1_all_gather_1")
    gather.kwargs = {k: v for k, v in gather.kwargs.items() if k not in ("group", "ranks")}


def shards_gathered_among_few(program: Program) -> None:
    gather = named(program, "layers_1_all_gather")
    gather.kwargs = {**gather.kwargs, "group": "reshard", "ranks": 2}


HYBRID_BREAKS: dict[Callable[[Program], None], tuple[str, str]] = {
    average_of_one_group: ("replicas", "is averaged over the 2 ranks of a replica only"),
    average_of_another_shard: ("replicas", "is no reduced shard of 'embed.weight'"),
    average_of_a_full_gradient: ("replicas", "is no reduced shard of 'embed.weight'"),
    average_within_the_shards: ("reduces", "is reduced here and by %layers_1_reduce_scatter"),
    average_twice: ("replicas", "'layers.1.up.weight' is averaged here and by %layers_1_all_red"),
    average_before_its_shards: ("metadata", "which stands below it"),
    reordered_averages: ("order", "it is issued where %layers_1_all_reduce was"),
    gather_over_the_replicas: ("groups", "this all_gather joins the ranks 'replicate'"),
    returned_before_the_average: ("reduces", "which %layers_1_all_reduce reduces"),
}
PARTS_BREAKS: dict[Callable[[Program], None], tuple[str, str]] = {
    other_groups_than_planned: ("gathers", "is not the shard of 'layers.1.up.weight'"),
    other_groups_throughout: ("reshards", "it keeps parts for groups of 4 ranks; the plan: 2"),
    part_of_another_parameter: ("gathers", "is not the shard of 'layers.1.up.weight'"),
    part_of_a_shard: ("shards", "reads the shard of 'layers.1.up.weight' as if it were"),
    part_read_whole: ("reshards", "it reads %layers_1_up_weight_part, a part kept for a gather"),
    part_taken_after_the_free: ("lifetimes", "after %layers_1_free freed it"),
    part_of_the_wrong_size: ("shapes", "and must be ((4, 6), torch.float32)"),
    swapped_parts: ("gathers", "is not the shard of 'layers.1.up.weight'"),
    parts_gathered_among_all: ("gathers", "is not the shard of 'layers.1.up.weight'"),
    shards_gathered_among_few: ("gathers", "is not the shard of 'layers.1.up.weight'"),
}


@pytest.mark.parametrize("break_it", [*HYBRID_BREAKS, *PARTS_BREAKS], ids=lambda f: f.__name__)
def test_a_broken_program_is_refused(break_it: Callable[[Program], None]) -> None:
    if break_it in HYBRID_BREAKS:
        program, plan = toys.rewritten(toys.blocks, Policy(**HYBRID), mesh=(2, 2))
    else:
        program, plan = toys.rewritten(toys.blocks, Policy(reshard_after_forward=2))
    reference = Reference.of(program)
    verify(program, plan, after="before")
    break_it(program)
    rule, said = {**HYBRID_BREAKS, **PARTS_BREAKS}[break_it]
    with pytest.raises(VerifyError) as raised:
        verify(program, plan, after="the culprit", reference=reference)
    message = str(raised.value)
    assert message.startswith(f"after pass 'the culprit' the program breaks the rule {rule!r}: ")
    assert said in message


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
    policy = graphshard.BlockPolicy(GPT.blocks, reshard_after_forward=2, recompute="units")
    plan = graphshard.plan(GPT.model(), policy, world_size=4, example_kwargs=GPT.inputs(0))
    assert plan.program is not None
    backward = [n for n in plan.program.nodes("backward") if n.target is ops.all_gather]
    assert [ops.group_of(node) for node in backward] == ["reshard", "reshard"]
