"""How many ranks a collective of a program joins, and on how many nodes they lie."""

from __future__ import annotations

from torch import fx

from graphshard import ops
from graphshard.cost.collective_cost import GroupShape, group_shape
from graphshard.plan import ShardingPlan
from graphshard.program import Program


def ranks_of(collective: fx.Node, program: Program, plan: ShardingPlan) -> int:
    """The number of ranks that join `collective`."""
    return shape_of(collective, program, plan, gpus_per_node=1 << 30).size


def shape_of(
    collective: fx.Node, program: Program, plan: ShardingPlan, gpus_per_node: int
) -> GroupShape:
    """The ranks of `collective` and the nodes they lie on."""
    unit = str(collective.kwargs.get("unit", ""))
    reshard = plan.unit(unit).options.reshard_ranks or 0
    group = ops.group_of(collective)
    if collective.target is ops.all_reduce and "group" not in collective.kwargs:
        group = ops.ALL
    return group_shape(group, program.mesh_shape, gpus_per_node, reshard)
