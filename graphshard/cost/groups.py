"""How many ranks a collective of a program joins, and on how many nodes they lie."""

from __future__ import annotations

from torch import fx

from graphshard import ops
from graphshard.cost.collective_cost import GroupShape, group_shape
from graphshard.program import Program


def ranks_of(collective: fx.Node, program: Program) -> int:
    """The number of ranks that join `collective`."""
    return shape_of(collective, program, gpus_per_node=1 << 30).size


def shape_of(collective: fx.Node, program: Program, gpus_per_node: int) -> GroupShape:
    """The ranks of `collective` and the nodes they lie on."""
    reshard: int = collective.kwargs.get("ranks") or 0  # type: ignore[assignment]
    group = ops.group_of(collective)
    if collective.target is ops.all_reduce and "group" not in collective.kwargs:
        group = ops.ALL
    return group_shape(group, program.mesh_shape, gpus_per_node, reshard)
