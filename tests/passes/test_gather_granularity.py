"""Gathers finer than a unit, or coarser: what moves together, by hand and by cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import toy_programs as toys
from granularity import (
    ALL_FINER,
    REDUCES,
    SPLIT,
    events,
    finer,
    gradient_bytes,
    most_unsharded,
)
from simulations import SLOW_HOPS, SLOW_NETWORK, score_of
from torch import nn
from toy_programs import BATCH, VOCAB, WIDTH, Toy

import graphshard
from graphshard import BlockPolicy, MixedPrecision, pipeline
from graphshard.cost.memory import memory_of
from graphshard.inspect.plan_text import moved_notes
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.split_ends import SplitEnds
from graphshard.passes.split_gathers import SplitGathers
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.layout import options_of
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.collective import params_of
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.verify.rules import verify

LAYERS = ("layers.0", "layers.1", "layers.2")

# -- split_gathers -----------------------------------------------------------------------------


def test_embedding_and_head_are_gathered_and_freed_apart() -> None:
    program, _ = finer(toys.blocks, SPLIT)
    assert events(program, FORWARD, "gather", "wait-gather", "run", "free") == (
        "gather embed, wait-gather embed, run root, free embed, "
        "gather 0, wait-gather 0, run layers.0, free 0, "
        "gather 1, wait-gather 1, run layers.1, free 1, "
        "gather 2, wait-gather 2, gather head, run layers.2, free 2, wait-gather head, run root"
    )
    assert events(program, BACKWARD, "gather", "free") == (
        "gather 2, free head, gather 1, free 2, gather 0, free 1, free 0"
    )
    plain, _ = finer(toys.blocks)
    # Two blocks while neither embedding nor head is there, against two blocks and both.
    assert (most_unsharded(program), most_unsharded(plain)) == (2 * 448, 2 * 448 + 2 * 288)


@pytest.mark.parametrize(
    ("ahead", "issued"),
    [
        (0, "run layers.2, free 2, gather head, wait"),
        (2, "gather 1, wait-gather 1, gather head, run"),
    ],
)
def test_a_later_gather_is_issued_as_far_ahead_as_others(ahead: int, issued: str) -> None:
    program, _ = finer(toys.blocks, SplitGathers(forward=ahead))
    assert issued in events(program, FORWARD, "gather", "wait-gather", "run", "free")


def test_a_tied_parameter_stays() -> None:
    program, _ = finer(toys.odd_params, SPLIT)
    assert events(program, FORWARD, "gather") == "gather embed, gather a, gather b"


def tied_with_norm() -> Program:
    """An embedding that is the head too, a position's scale before, a norm's before the head."""
    toy = Toy(
        {"embed.weight": (VOCAB, WIDTH), "place.weight": (WIDTH,)}
        | toys.block_params("layers.0")
        | {"norm.weight": (WIDTH,)}
    )
    toy.tangent(BATCH, VOCAB)
    x = toy.embedding("embed.weight")
    x = toy.op(toys.aten.mul.Tensor, x, toy.params["place.weight"], module="")
    x = toy.block(x, "layers.0")
    x = toy.op(toys.aten.mul.Tensor, x, toy.params["norm.weight"], module="")
    return toy.finish(toy.linear(x, "embed.weight"))


def test_small_parameters_join_what_is_gathered_at_their_place() -> None:
    def gathers(step: SplitGathers) -> str:
        program, _ = finer(tied_with_norm, step, units=("", "layers.0"))
        return events(program, FORWARD, "gather", "free")

    assert gathers(SplitGathers(alone=100)) == "gather embed+place+norm, gather 0, free 0"
    assert gathers(SplitGathers()) == (
        "gather embed, gather place, free place, gather 0, gather norm, free 0, free norm"
    )


def test_what_a_strategy_keeps_for_backward_is_not_gathered_again_there() -> None:
    policy = Policy(strategy="SHARD_GRAD_OP")
    program, _ = finer(toys.blocks, SPLIT, policy=policy)
    assert events(program, FORWARD, "gather", "free") == (
        "gather embed, free embed, gather 0, gather 1, gather 2, gather head"
    )
    assert events(program, BACKWARD, "gather") == ""


@pytest.mark.parametrize(
    "policy",
    [
        Policy(reshard_root=True),
        Policy(strategy="SHARD_GRAD_OP"),
        Policy(reshard_after_forward=2),
        Policy(offload="params"),
        Policy(backward_prefetch=None),
        Policy(recompute="units"),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", list(toys.UNITS), ids=lambda build: build.__name__)
def test_every_policy_computes_what_was_captured(build: Any, policy: Policy) -> None:
    program, plan = finer(build, *ALL_FINER, policy=policy)
    plain, _ = finer(build, policy=policy)
    assert gradient_bytes(program) <= gradient_bytes(plain)
    verify(program, plan, after="all")


def test_copies_to_the_device_are_counted_anew() -> None:
    policy = Policy(offload="params")
    program, _ = finer(tied_with_norm, SPLIT, policy=policy, units=("", "layers.0"))
    copies = [node for node in program.nodes() if node.target is ops.to_device]
    (note,) = program.notes
    assert f"in {len(copies)} copies to the device" in note


@dataclass(frozen=True)
class _Within:
    """Set the budget to so many bytes."""

    most: int
    name: str = field(default="within", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        assert program.budget is not None
        program.budget = replace(program.budget, bytes=self.most)


# -- split_ends ------------------------------------------------------------------------------


def moved(program: Program, op: str) -> list[list[str]]:
    """The parameters of each collective of the kind, in the order in which they are issued."""
    nodes = [node for node in program.nodes() if ops.op_name(node) == op]
    return [list(params_of(node)) for node in nodes]


def parts_of(program: Program, op: str, unit: str) -> list[str]:
    """The leaves of the parameters that each collective of the unit moves, as "down" or "up"."""
    return [
        "+".join(name.split(".")[2] for name in names)
        for names in moved(program, op)
        if names[0].startswith(unit)
    ]


@pytest.mark.parametrize(
    ("policy", "mesh"),
    [
        (Policy(), (4,)),
        (Policy(strategy="HYBRID_SHARD"), (2, 2)),
        (Policy(strategy="SHARD_GRAD_OP"), (4,)),
        (Policy(strategy="SHARD_OPTIMIZER"), (4,)),
        (Policy(offload="params"), (4,)),
        (Policy(forward_prefetch=2), (4,)),
    ],
    ids=str,
)
def test_the_ends_of_a_step_go_in_parts(policy: Policy, mesh: tuple[int, ...]) -> None:
    program, plan = finer(toys.blocks, SplitEnds(1), policy=policy, mesh=mesh)
    plain, _ = finer(toys.blocks, policy=policy, mesh=mesh)
    first, *others = LAYERS
    forward = len(parts_of(plain, "all_gather", first)) - 1
    assert parts_of(program, "all_gather", first) == ["up", "down", *["up+down"] * forward]
    assert parts_of(program, "reduce_scatter", first) == ["down", "up"]
    for unit in others:
        for op in ("all_gather", "reduce_scatter"):
            assert parts_of(program, op, unit) == parts_of(plain, op, unit)
    kept, whole = (memory_of(each, plan, optimizer="none").peak.bytes for each in (program, plain))
    assert kept <= whole


def test_compute_begins_behind_the_first_part_and_the_last_reduce_is_a_part() -> None:
    program, _ = finer(toys.blocks, SplitEnds(1))
    nodes = list(program.graph.nodes)
    waits = [
        node
        for node in nodes
        if node.target is ops.wait and params_of(ops.collective_of(node))[0].startswith(LAYERS[0])
    ]
    early, late = waits[:2]
    between = nodes[nodes.index(early) : nodes.index(late)]
    assert any(ops.is_compute(node) for node in between)
    assert ops.collective_of(late) < early  # all parts are issued where the whole was
    reduces = [w for w in waits if ops.collective_of(w).target is ops.reduce_scatter]
    issued = [nodes.index(ops.collective_of(wait)) for wait in reduces]
    assert any(map(ops.is_compute, nodes[issued[0] : issued[1]]))


def test_parts_are_worth_a_message_and_merged_ends_stay_whole() -> None:
    whole, _ = finer(toys.blocks, SplitEnds(100))
    assert parts_of(whole, "all_gather", LAYERS[0]) == ["up+down"] * 2
    merged, _ = finer(toys.blocks, MergeGathers(1000), SplitEnds(1))
    alone, _ = finer(toys.blocks, MergeGathers(1000))
    for op in ("all_gather", "reduce_scatter"):
        (found, expected) = (
            [names for names in moved(each, op) if names[0].startswith("layers")]
            for each in (merged, alone)
        )
        assert found == expected


class Ready(torch.autograd.Function):
    """A gradient that is known since forward, and a parameter that only backward reads."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(w, b, x.sin())
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        w, b, known = ctx.saved_tensors
        return grad @ w.t() + b, known, b * 2


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.w, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.inside = nn.Identity()

    def forward(self, x):
        return self.inside(Ready.apply(torch.relu(x @ self.v), self.w, self.b)).sin()


class Part(nn.Sequential):
    pass


class Untied(nn.Module):
    """A head that is ready to be reduced when backward begins, and large."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2000, 64), nn.Linear(64, 2000, bias=False)
        self.blocks = nn.Sequential(
            *(Part(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(6))
        )

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids))).square().mean()


BF16 = MixedPrecision(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mixed_precision": BF16},
        {"mixed_precision": BF16, "recompute": "units"},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "SHARD_OPTIMIZER"},
        {"offload": "params"},
        {"reshard_after_forward": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("make", "block", "inputs"),
    [
        (lambda: nn.Sequential(Odd(), Odd()), Odd, torch.ones(8, 8)),
        (Untied, Part, torch.zeros(2, 8, dtype=torch.int64)),
    ],
    ids=["odd", "untied"],
)
def test_captured_steps_go_in_parts_and_hold_no_more(
    make: Any, block: Any, inputs: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned() -> ShardingPlan:
        policy = BlockPolicy({block}, merge_below=16, **fields)
        return graphshard.plan(make(), policy, example_inputs=(inputs,), world_size=4)

    parts = planned()
    monkeypatch.setattr(SplitEnds, "apply", lambda *_: None)
    whole = planned()
    assert len(moved(parts.program, "all_gather")) > len(moved(whole.program, "all_gather"))
    kept, before = (memory_of(each.program, each).peak.bytes for each in (parts, whole))
    assert kept <= before


@pytest.mark.parametrize("merge_below", [0, 16])
def test_gradients_known_since_forward_are_reduced_in_backward(
    merge_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "APART", 0)
    model = Odd()  # the root reads its own parameters before and behind the units inside it
    model.inside = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = BlockPolicy({nn.Linear}, merge_below=merge_below)
    plan = graphshard.plan(model, policy, example_inputs=(torch.ones(8, 8),), world_size=4)
    nodes = [node for node in plan.program.nodes() if ops.is_scatter(node)]
    assert sum("w" in params_of(node) for node in nodes) == 1
    assert {node.meta["phase"] for node in nodes} == {BACKWARD}


# -- skip_reshard ----------------------------------------------------------------------------


def test_a_unit_used_twice_is_kept_from_its_last_run_to_backward_s_first() -> None:
    program, _ = finer(toys.back_and_forth, may_stay=("a", "b"))
    assert events(program, BACKWARD, "gather", "free") == (
        "gather b, free a, gather a, free b, free a"
    )


@pytest.mark.parametrize(
    ("policy", "may_stay", "mesh", "gathered"),
    [
        (Policy(), LAYERS, (4,), "gather 1, free 2, gather 0, free 1, free 0"),
        (Policy(), LAYERS, (2, 2), "gather 1, free 2, gather 0, free 1, free 0"),
        (Policy(), LAYERS[:2], (4,), "gather 2, gather 1, free 2, gather 0, free 1, free 0"),
        # A message of backward would hold the last two.
        (Policy(merge_below=300), LAYERS, (4,), "gather 0, free 1+2, free 0"),
        (Policy(merge_below=300), LAYERS[2:], (4,), "gather 1+0, free 2, free 1+0"),
        (Policy(merge_below=1000), LAYERS, (4,), "free 0+1+2"),
        (Policy(offload="params"), LAYERS, (4,), "gather 1, free 2, gather 0, free 1, free 0"),
        (
            Policy(reshard_root=True),
            LAYERS,
            (4,),
            "gather head, gather 1, free 2, gather 0, free 1, free 0, free head",
        ),
        (Policy(), LAYERS, (1,), "gather 2, gather 1, free 2, gather 0, free 1, free 0"),
    ],
    ids=str,
)
def test_units_with_which_backward_begins_stay(
    policy: Policy, may_stay: tuple[str, ...], mesh: tuple[int, ...], gathered: str
) -> None:
    if len(mesh) == 2:
        policy = replace(policy, strategy="HYBRID_SHARD")
    program, plan = finer(toys.blocks, policy=policy, mesh=mesh, may_stay=may_stay)
    assert events(program, BACKWARD, "gather", "free").removesuffix(", free embed+head") == gathered
    without, _ = finer(toys.blocks, policy=policy, mesh=mesh)
    kept, freed = (
        memory_of(each, plan, optimizer="none").peak.bytes for each in (program, without)
    )
    assert kept <= freed


@pytest.mark.parametrize(
    ("fields", "stays"),
    [
        ({}, True),
        ({"strategy": "HYBRID_SHARD"}, True),
        ({"reshard_after_forward": True}, False),
        ({"reshard_after_forward": False}, False),
        ({"strategy": "SHARD_GRAD_OP"}, False),
        ({"backward_prefetch": "post"}, False),
        ({"memory_budget": 1000}, False),
        ({"recompute": "units"}, False),
    ],
    ids=str,
)
def test_who_may_stay(fields: dict[str, Any], stays: bool) -> None:
    policy = Policy(**fields)
    assert options_of(policy, "a", {}).may_stay is stays
    assert not options_of(policy, "", {}).may_stay
    assert not options_of(policy, "a", {"reshard_after_forward": False}).may_stay


# -- merge_gathers ---------------------------------------------------------------------------


def test_neighbours_are_gathered_and_reduced_together_up_to_a_limit() -> None:
    program, _ = finer(toys.blocks, MergeGathers(900 // 4))
    assert events(program, FORWARD, "gather", "free") == (
        "gather embed+head, gather 0+1, free 0+1, gather 2, free 2"
    )
    assert events(program, BACKWARD, "gather", "reduce", "free") == (
        "gather 2+1, gather 0, free 2+1, reduce 2+1, free 0, free embed+head, reduce 0+embed+head"
    )
    gathers = [node for node in program.nodes() if node.target is ops.all_gather]
    assert gathers[1].kwargs["units"] == ("layers.0",) * 2 + ("layers.1",) * 2
    assert "896 bytes with layers.1, 4 params" in str(program)


def test_a_merged_gather_is_issued_before_the_compute_of_the_one_before_it() -> None:
    units = ("", *(f"layers.{i}" for i in range(5)))

    def order(phase: str, **ahead: int) -> str:
        step = MergeGathers(900 // 4, **ahead)
        policy = Policy(backward_prefetch=None)
        program, _ = finer(lambda: toys.blocks(5), step, policy=policy, units=units)
        return events(program, phase, "gather", "run")

    blocks = "run layers.0, run layers.1, gather 2+3, run layers.2, run layers.3, gather 4"
    assert order(FORWARD).startswith(f"gather embed+head, run root, gather 0+1, {blocks}")
    assert order(FORWARD, forward=1) == (
        "gather embed+head, gather 0+1, run root, gather 2+3, run layers.0, run layers.1, "
        "gather 4, run layers.2, run layers.3, run layers.4, run root"
    )
    assert order(FORWARD, forward=2).startswith(
        "gather embed+head, gather 0+1, gather 2+3, run root, gather 4, run layers.0"
    )
    assert order(BACKWARD, backward=1) == (
        "run root, gather 4+3, gather 2+1, run layers.4, run layers.3, gather 0, run layers.2, "
        "run layers.1, run layers.0, run root"
    )


ALL = "2+1+0+embed+head"


@pytest.mark.parametrize(
    ("fields", "mesh", "forward", "backward"),
    [
        (
            {"strategy": "SHARD_GRAD_OP"},
            (4,),
            "gather embed+head, gather 0+1+2",
            f"free 0+1+2, free embed+head, reduce {ALL}",
        ),
        ({"strategy": "NO_SHARD"}, (4,), "", f"average {ALL}"),
        (
            {"strategy": "HYBRID_SHARD"},
            (2, 4),
            "gather embed+head, gather 0+1+2, free 0+1+2",
            f"gather 2+1+0, free 2+1+0, free embed+head, reduce {ALL}, average {ALL}",
        ),
        (
            {"reshard_after_forward": 2},
            (4,),
            "gather embed+head, gather 0+1+2, free 0+1+2",
            f"gather 2+1+0, free 2+1+0, free embed+head, reduce {ALL}",
        ),
    ],
    ids=["zero2", "whole", "replicas", "parts"],
)
def test_neighbours_move_together_under_other_strategies(
    fields: dict[str, Any], mesh: tuple[int, ...], forward: str, backward: str
) -> None:
    policy = Policy(merge_below=1 << 20, **fields)
    program, _ = finer(toys.blocks, policy=policy, mesh=mesh)
    assert events(program, FORWARD, "gather", "free") == forward
    assert events(program, BACKWARD, "gather", "reduce", "average", "free") == backward


def test_units_inside_a_unit_are_not_gathered_with_it() -> None:
    program, _ = finer(toys.nested, MergeGathers(640 // 4))
    assert sum(node.target is ops.all_gather for node in program.nodes(FORWARD)) == 4
    assert events(program, FORWARD, "gather") == (
        "gather embed+tower, gather tower, gather top"  # tower.0 and tower.1 apart
    )


def test_a_unit_that_runs_again_is_not_gathered_with_itself() -> None:
    program, _ = finer(toys.back_and_forth, MergeGathers(1 << 20))
    assert events(program, FORWARD, "gather", "free") == (
        "gather embed+a+b, gather a, free a, free embed+a+b"
    )


def test_units_are_merged_only_where_latency_costs_time() -> None:
    step = MergeGathers()
    policy = Policy(memory_budget=10**6)
    slow, _ = finer(toys.blocks, step, hardware=SLOW_HOPS, policy=policy)
    fewer = [node for node in slow.nodes() if ops.is_collective(node)]
    wide, _ = finer(toys.blocks, step, hardware=SLOW_NETWORK, policy=policy)
    as_many = [node for node in wide.nodes() if ops.is_collective(node)]
    assert len(fewer) < len(as_many) == 11
    tight, plan = finer(toys.blocks, step, hardware=SLOW_HOPS)
    assert tight.budget is not None
    assert score_of(tight, plan).bytes <= tight.budget.bytes


def test_by_cost_as_much_is_merged_as_by_default() -> None:
    """Where bytes take all the time, a merged step takes 0.2 % longer than one that is not."""
    fields = {"hardware": SLOW_NETWORK, "merge_below": 900 // 4}
    policy = Policy(schedule="overlap", strategy="SHARD_GRAD_OP", **fields)
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks], policy)
    run_passes(program, plan, default_passes(policy))
    assert events(program, FORWARD, "gather") == "gather embed+head, gather 0+1, gather 2"


# -- what the plan says ------------------------------------------------------------------------


def test_the_plan_says_what_moves_apart_together_or_stays() -> None:
    steps = (SPLIT, REDUCES, MergeGathers(500 // 4))
    program, plan = finer(toys.blocks, *steps, may_stay=("layers.2",))
    notes = list(moved_notes(replace(plan, program=program)))
    assert notes == [
        ("apart", "(root) is gathered in 2 parts: embed.weight; head.weight"),
        ("apart", "(root) is reduced in 2 parts: head.weight; embed.weight"),
        ("unsharded", "layers.2 from forward to backward, not gathered again"),
    ]
    program, plan = finer(toys.blocks, MergeGathers(900 // 4))
    together = [text for name, text in moved_notes(replace(plan, program=program))]
    assert together == [
        f"adjacent units share one {op}, twice in a step, with at most 2 units and {size} in it"
        for op, size in (("all_gather", "896 B"), ("reduce_scatter", "864 B"))
    ]
