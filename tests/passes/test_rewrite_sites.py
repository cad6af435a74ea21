"""Where passes rewrite: views of parameters, parameters used or returned in odd places."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import toy_programs as toys
from torch import fx
from toy_programs import BATCH, VOCAB, WIDTH, Toy, aten

from graphshard.errors import PassError
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.prefetch import Prefetch
from graphshard.passes.reduce_grads import ReduceGrads
from graphshard.passes.regather import Regather
from graphshard.passes.sink_waits import SinkWaits
from graphshard.passes.unshard import Unshard
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.aliases import derived_values
from graphshard.program.edit import entries_by_name, insert_gather
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import assign_units

GRAD_OP = Policy(strategy="SHARD_GRAD_OP")


def gathered(program: Program, op: Callable[..., Any] = ops.all_gather) -> list[tuple[str, ...]]:
    """The parameters of every collective of a kind, in order."""
    return [node.kwargs["params"] for node in program.nodes() if node.target is op]


def kept_for_backward(program: Program) -> list[fx.Node]:
    """Forward values that backward reads."""
    return [
        node
        for node in program.nodes(FORWARD)
        if any(user.op != "output" and user.meta["phase"] == BACKWARD for user in node.users)
    ]


def one_block(
    view: Callable[[Toy, fx.Node], fx.Node],
) -> Callable[[], Program]:
    """Embedding, then one linear layer of module a over some other form of its weight."""

    def build() -> Program:
        toy = Toy({"embed.weight": (VOCAB, WIDTH), "a.weight": (WIDTH, WIDTH)})
        toy.tangent(BATCH, WIDTH)
        x = toy.embedding("embed.weight")
        return toy.finish(toy.linear(x, "a.weight", view=lambda w: view(toy, w)))

    return build


def rewrite(
    build: Callable[[], Program], policy: Policy | None = None, units: tuple[str, ...] = ("", "a")
) -> tuple[Program, ShardingPlan]:
    program = build()
    plan = toys.make_toy_plan(program, units, policy, world_size=2)
    toys.run_passes(program, plan, toys.default_passes(plan.policy))
    toys.assert_same_values(build(), program, plan)
    return program, plan


CHEAP: dict[str, Callable[[Toy, fx.Node], fx.Node]] = {
    "t": lambda toy, w: toy.op(aten.t.default, w),
    "permute": lambda toy, w: toy.op(aten.permute.default, w, [1, 0]),
    "transpose": lambda toy, w: toy.op(aten.transpose.int, w, 0, 1),
    "t of t of t": lambda toy, w: toy.transpose(toy.transpose(toy.transpose(w))),
    "view": lambda toy, w: toy.op(aten.view.default, w, [WIDTH, WIDTH]),
    "_unsafe_view": lambda toy, w: toy.op(aten._unsafe_view.default, w, [WIDTH, WIDTH]),
    "slice": lambda toy, w: toy.op(aten.slice.Tensor, w, 0, 0, WIDTH),
    "expand": lambda toy, w: toy.op(aten.expand.default, w, [WIDTH, WIDTH]),
    "detach": lambda toy, w: toy.op(aten.detach.default, w),
    "alias": lambda toy, w: toy.op(aten.alias.default, w),
    "unsqueeze": lambda toy, w: toy.op(aten.squeeze.dim, toy.op(aten.unsqueeze.default, w, 0), 0),
    "split": lambda toy, w: toy.op(operator.getitem, toy.op(aten.split.Tensor, w, WIDTH), 0),
    "cast": lambda toy, w: toy.transpose(toy.op(aten._to_copy.default, w)),
    "copy": lambda toy, w: toy.op(aten.clone.default, toy.transpose(w)),
}


@pytest.mark.parametrize("name", CHEAP)
def test_views_and_casts_are_made_again_in_backward(name: str) -> None:
    program, plan = rewrite(one_block(CHEAP[name]))
    assert gathered(program) == [("embed.weight",), ("a.weight",), ("a.weight",)]
    derived = derived_values(program, plan)
    assert not [node for node in kept_for_backward(program) if node in derived]


def test_expensive_values_of_a_parameter_stay_saved() -> None:
    program, _ = rewrite(one_block(lambda toy, w: toy.op(aten.cos.default, w)))
    assert [n.target for n in kept_for_backward(program)] == [
        aten.embedding.default,
        aten.cos.default,
    ]
    assert gathered(program) == [("embed.weight",), ("a.weight",)]


def test_a_view_made_far_from_its_use_is_made_where_it_is_used() -> None:
    def build() -> Program:
        toy = Toy({"embed.weight": (VOCAB, WIDTH)} | {f"{m}.weight": (WIDTH, WIDTH) for m in "ab"})
        toy.tangent(BATCH, WIDTH)
        turned = toy.op(aten.t.default, toy.params["a.weight"], module="b")
        x = toy.embedding("embed.weight")
        x = toy.linear(x, "b.weight")
        return toy.finish(toy.linear(x, "a.weight", view=lambda w: turned))

    for options in ({"backward_prefetch": None}, {"strategy": "SHARD_GRAD_OP"}):
        policy = Policy(forward_prefetch=0, **options)
        program, _ = rewrite(build, policy, ("", "a", "b"))
        schedule = [(e.op, e.unit) for e in program.schedule() if e.phase == FORWARD]
        assert schedule.index(("all_gather", "a")) > schedule.index(("compute", "b"))


def test_a_view_made_in_one_run_is_made_again_in_the_next() -> None:
    def build() -> Program:
        toy = Toy({"embed.weight": (VOCAB, WIDTH)} | {f"{m}.weight": (WIDTH, WIDTH) for m in "ab"})
        toy.tangent(BATCH, WIDTH)
        x = toy.embedding("embed.weight")
        toy.module = "a"
        turned = toy.transpose(toy.params["a.weight"])
        for name in "aba":
            x = toy.linear(x, f"{name}.weight", view=None if name == "b" else lambda w: turned)
        return toy.finish(x)

    program, _ = rewrite(build, units=("", "a", "b"))
    assert gathered(program).count(("a.weight",)) == 4


def test_a_parameter_used_by_another_unit_is_gathered_there() -> None:
    def build() -> Program:
        toy = Toy({"embed.weight": (VOCAB, WIDTH)} | {f"{m}.weight": (WIDTH, WIDTH) for m in "ab"})
        toy.tangent(BATCH, WIDTH)
        x = toy.embedding("embed.weight")
        x = toy.linear(x, "a.weight")
        x = toy.linear(x, "b.weight")
        x = toy.relu(x, "")
        wt = toy.op(aten.t.default, toy.params["a.weight"], module="b")
        return toy.finish(toy.op(aten.mm.default, x, wt, module="b"))

    program, _ = rewrite(build, units=("", "a", "b"))
    assert gathered(program).count(("a.weight",)) == 3


@pytest.mark.parametrize("policy", [Policy(), GRAD_OP, Policy(strategy="NO_SHARD")], ids=str)
def test_returned_parameters_are_copies(policy: Policy) -> None:
    def build() -> Program:
        toy = Toy({"embed.weight": (VOCAB, WIDTH), "a.weight": (WIDTH, WIDTH)})
        toy.tangent(BATCH, WIDTH)
        x = toy.linear(toy.embedding("embed.weight"), "a.weight")
        weight = toy.params["a.weight"]
        turned = toy.transpose(weight)
        cast = toy.op(aten._to_copy.default, weight)
        return toy.finish(x, extra=(weight, turned, turned, cast))

    rewrite(build, policy)  # on freed memory the values would be NaN


@pytest.mark.parametrize("policy", [Policy(), GRAD_OP], ids=["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("also_used", [False, True])
def test_a_parameter_only_backward_reads(policy: Policy, also_used: bool) -> None:
    """As a custom autograd function may save one."""

    def build() -> Program:
        toy = Toy({"embed.weight": (VOCAB, WIDTH), "a.weight": (WIDTH, WIDTH), "a.gain": (WIDTH,)})
        toy.tangent(BATCH, WIDTH)
        x = toy.relu(toy.embedding("embed.weight"), "a")
        if also_used:
            x = toy.op(aten.mul.Tensor, x, toy.params["a.gain"], module="a")

        def backward(gy: fx.Node) -> fx.Node:
            toy.module = "a"
            return toy.op(aten.mm.default, gy, toy.params["a.weight"])

        toy.tape.append(backward)
        return toy.finish(x)

    program, _ = rewrite(build, policy)
    in_forward = ("a.weight",) if policy == GRAD_OP else ()
    in_forward += ("a.gain",) if also_used else ()
    assert gathered(program) == [
        ("embed.weight",),
        *([in_forward] if in_forward else []),
        *([("a.weight",)] if policy != GRAD_OP else []),
    ]


def test_a_parameter_of_a_unit_that_never_runs_in_forward() -> None:
    toy = Toy({"embed.weight": (VOCAB, WIDTH), "a.weight": (WIDTH, WIDTH)})
    toy.tangent(BATCH, WIDTH)
    x = toy.embedding("embed.weight")
    toy.tape.append(lambda gy: toy.op(aten.mm.default, gy, toy.params["a.weight"], module="a"))
    program = toy.finish(x)
    plan = toys.make_toy_plan(program, ("", "a"))
    with pytest.raises(PassError, match=r"pass unshard: backward reads \['a.weight'\] of unit 'a'"):
        toys.run_passes(program, plan, toys.default_passes(plan.policy))


def captured_blocks() -> tuple[Program, ShardingPlan]:
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks])
    assign_units(program, plan)
    return program, plan


@pytest.mark.parametrize(("limit", "waits_before_last_reduce"), [(0, 3), (1, 3), (2, 2), (9, 0)])
def test_reduces_in_flight(limit: int, waits_before_last_reduce: int) -> None:
    program, plan = captured_blocks()
    for step in (Unshard(), Regather(), ReduceGrads(), SinkWaits(limit)):
        step.apply(program, plan)
    nodes = list(program.nodes(BACKWARD))
    waits = [n for n in nodes if n.target is ops.wait]
    waits = [n for n in waits if ops.collective_of(n).target is ops.reduce_scatter]
    last = max(nodes.index(n) for n in nodes if n.target is ops.reduce_scatter)
    assert sum(nodes.index(wait) < last for wait in waits) == waits_before_last_reduce
    at_once = [ops.is_collective(wait.prev) for wait in waits]
    assert all(at_once) or limit


def test_passes_that_must_run_once_say_so() -> None:
    program, plan = toys.rewritten(toys.blocks)
    with pytest.raises(PassError, match=r"unshard.*already"):
        Unshard().apply(program, plan)
    with pytest.raises(PassError, match=r"reduce_grads.*'embed.weight' is reduced already"):
        ReduceGrads().apply(program, plan)
    with pytest.raises(PassError, match=r"insert_free.*root_full.*already"):
        InsertFree().apply(program, plan)


def test_a_gather_that_serves_no_run() -> None:
    program, plan = captured_blocks()
    for step in (Unshard(), Regather()):
        step.apply(program, plan)
    insert_gather(
        program,
        plan,
        "layers.0",
        ["layers.0.up.weight"],
        entries=entries_by_name(program),
        before=program.first_backward(),
        phase=FORWARD,
    )
    with pytest.raises(PassError, match=r"prefetch: layers_0_all_gather_2 of unit 'layers.0'"):
        Prefetch().apply(program, plan)
    with pytest.raises(
        PassError, match=r"insert_free: layers_0_full_2 of unit 'layers.0' is never"
    ):
        InsertFree().apply(program, plan)


def test_sink_waits_takes_a_number_of_reduces() -> None:
    with pytest.raises(PassError, match="max_reduces_in_flight must be 0 or more; got -1"):
        SinkWaits(-1)
