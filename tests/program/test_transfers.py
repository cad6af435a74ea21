"""Transfers: vocabulary nodes around collectives, which every pass and rule lets through."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from toy_programs import UNITS, assert_same_values, blocks, make_toy_plan, odd_params

from graphshard.errors import VerifyError
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.aliases import unpacks
from graphshard.program.edit import insert_node
from graphshard.program.program import Event, Program
from graphshard.verify.numbering import Values
from graphshard.verify.rules import verify


def through(
    program: Program,
    node: fx.Node,
    tensors: Iterable[fx.Node],
    before: fx.Node,
    targets: Iterable[Any],
    dtype: torch.dtype = torch.float32,
) -> list[fx.Node]:
    """`tensors`, operands or results of the collective of `node`, through transfers."""
    unit, params = (ops.collective_of(node).kwargs[key] for key in ("unit", "params"))
    tensors = list(tensors)
    for target in targets:
        to = {"dtype": dtype} if target is ops.cast else {}
        with program.graph.inserting_before(before):
            tensors = [
                insert_node(
                    program,
                    target,
                    (tensor,),
                    to | {"unit": unit, "param": param},
                    name=f"{param}_moved",
                    unit=unit,
                    phase=node.meta["phase"],
                    val=tensor.meta["val"].to(to.get("dtype")),
                )
                for tensor, param in zip(tensors, params, strict=True)
            ]
    return tensors


@dataclass(frozen=True)
class FromHost:
    """Shards come from the host and are cast to their own dtype; gradients go back there."""

    name: str = "from_host"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        results = program.results()
        for node in list(program.nodes()):
            if node.target is ops.all_gather:
                node.args = (
                    through(
                        program, node, node.args[0], node, (ops.to_device, ops.arrive, ops.cast)
                    ),
                )
            elif node.target is ops.wait and ops.collective_of(node).target in ops.REDUCES:
                picked = unpacks(node)
                after = picked[-1].next
                moved = through(program, node, picked, after, (ops.to_host, ops.arrive))
                new = dict(zip(picked, moved, strict=True))
                results.grads = [new.get(grad, grad) for grad in results.grads]
        program.set_results(results)


def moved(build: Callable[[], Program], **fields: Any) -> tuple[Program, Program, ShardingPlan]:
    policy = Policy(**fields)
    captured, program = build(), build()
    plan = make_toy_plan(program, UNITS[build], policy)
    passes = list(default_passes(policy))
    names = [step.name for step in passes]
    passes.insert(names.index("reduce_grads") + 1, FromHost())
    run_passes(program, plan, passes)
    return captured, program, plan


@pytest.mark.parametrize("build", [blocks, odd_params])
@pytest.mark.parametrize("prefetch", ["pre", "post", None])
def test_values_stay_and_every_pass_moves_transfers_along(
    build: Callable[[], Program], prefetch: str | None
) -> None:
    captured, program, plan = moved(build, backward_prefetch=prefetch, forward_prefetch=1)
    assert_same_values(captured, program, plan)
    for node in program.nodes():
        if node.target is ops.all_gather:
            assert node.prev.target is ops.cast
            for shard in node.args[0]:
                assert ops.origin(shard).op == "placeholder"


def test_transfers_of_a_unit_are_one_event() -> None:
    _, program, _ = moved(blocks)
    schedule = program.schedule()
    at = schedule.index(Event("all_gather", "layers.1", "forward"))
    assert schedule[at - 3 : at] == [
        Event("to_device", "layers.1", "forward"),
        Event("arrive", "layers.1", "forward"),
        Event("cast", "layers.1", "forward"),
    ]
    assert [event.op for event in schedule].count("to_host") == 4
    assert "to_device       layers.1  112 bytes, 2 params: f32[2, 6], f32[2, 8]" in str(program)


def test_unused_tangents_drop_their_transfers() -> None:
    _, program, plan = moved(blocks)
    DropUnusedTangents(frozenset({0})).apply(program, plan)
    verify(program, plan, after="drop")
    assert {node.target for node in program.nodes("backward")} == {ops.free}  # of the root's


def numbered_as_cast(other: Callable[[fx.Graph, fx.Node], fx.Node]) -> bool:
    """Whether the node `other` makes of a float32 x has the number of its cast to bfloat16."""
    program = blocks(1)
    x = next(n for n in program.nodes() if n.target is torch.ops.aten.embedding.default)
    with program.graph.inserting_after(x):
        made = other(program.graph, x)
        cast = program.graph.call_function(ops.cast, (x,), {"dtype": torch.bfloat16})
    for node in (made, cast):
        node.meta.update(x.meta, val=x.meta["val"].to(torch.bfloat16))
    values = Values.of(program)
    return bool(values.of_node[made] == values.of_node[cast])


def test_casts_by_every_operator_have_one_number() -> None:
    to_copy, bfloat16 = torch.ops.aten._to_copy.default, torch.bfloat16
    convert = torch.ops.prims.convert_element_type.default

    def copied(**options: Any) -> bool:
        return numbered_as_cast(lambda g, x: g.call_function(to_copy, (x,), options))

    assert copied(dtype=bfloat16)
    assert copied(dtype=bfloat16, layout=torch.strided, device=torch.device("cpu"))
    assert not copied(dtype=bfloat16, device=torch.device("meta"))
    assert numbered_as_cast(lambda g, x: g.call_function(convert, (x, bfloat16)))
    assert not numbered_as_cast(lambda g, x: g.call_function(convert, (x, torch.float16)))


def first(program: Program, target: object) -> fx.Node:
    return next(node for node in program.nodes() if node.target is target)


def other_unit(program: Program) -> None:
    node = first(program, ops.cast)
    node.kwargs = {**node.kwargs, "unit": "layers.0"}


def other_dtype(program: Program) -> None:
    node = first(program, ops.cast)
    node.kwargs = {**node.kwargs, "dtype": torch.float16}


def other_shard(program: Program) -> None:
    gather = next(n for n in program.nodes() if n.kwargs.get("params", ()).__len__() == 2)
    gather.args = (list(reversed(gather.args[0])),)


def read_by_compute(program: Program) -> None:
    first(program, torch.ops.aten.relu.default).args = (first(program, ops.cast),)


def other_gradient(program: Program) -> None:
    results = program.results()
    results.grads[1], results.grads[2] = results.grads[2], results.grads[1]
    program.set_results(results)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_unit, "is not a parameter of unit"),
        (other_dtype, "must be"),
        (other_shard, "is not the shard of"),
        (read_by_compute, "as if it were the parameter"),
        (other_gradient, "is returned as the gradient of"),
    ],
)
def test_what_is_wrong_with_a_transfer_is_told(
    change: Callable[[Program], None], said: str
) -> None:
    _, program, plan = moved(blocks)
    change(program)
    with pytest.raises(VerifyError, match=said):
        verify(program, plan, after="test")


def test_origin_stops_at_what_is_no_transfer() -> None:
    _, program, _ = moved(blocks)
    picked = first(program, operator.getitem)
    assert ops.origin(picked) is picked
