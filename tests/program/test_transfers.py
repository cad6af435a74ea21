"""Transfers: vocabulary nodes around collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from toy_programs import blocks, offloaded

from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.program import ops
from graphshard.verify.numbering import Values
from graphshard.verify.rules import verify


def test_unused_tangents_drop_their_transfers() -> None:
    program, plan = offloaded(blocks, "params")
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


def test_origin_stops_at_what_is_no_transfer() -> None:
    program, _ = offloaded(blocks, "params")
    picked = next(node for node in program.nodes() if ops.is_unpack(node))
    assert ops.origin(picked) is picked
