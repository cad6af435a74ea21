"""all_reduce_small: average small gradients by an all_reduce instead of a reduce_scatter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective, params_of
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, Program


@dataclass(frozen=True)
class AllReduceSmall(Pass):
    """Replace each `reduce_scatter` of fewer than `below` bytes by an `all_reduce_shard`.

    A ring reduce_scatter takes one step for each rank, but an all_reduce along a tree takes the
    logarithm of that. The time of small gradients is latency, so fewer steps are faster although
    twice the bytes move.

    Args:
        below: bytes of the full gradients of one reduce, in the dtype they are reduced in; at
            least 1. Smaller ones are replaced.
    """

    below: int

    def __post_init__(self) -> None:
        if self.below < 1:
            raise PassError(f"pass {self.name}: below must be 1 byte or more; got {self.below}")

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if plan.shard_size == 1:
            return
        for node in list(program.nodes(BACKWARD)):
            if node.target is ops.reduce_scatter and _bytes(node, plan) < self.below:
                _replace(program, node)


def _bytes(reduce: fx.Node, plan: ShardingPlan) -> int:
    """Bytes of the full gradients that `reduce` averages, in the dtype of the reduce."""
    layouts = [plan.layouts[name] for name in params_of(reduce)]
    return sum(prod(layout.shape) * layout.reduce_dtype.itemsize for layout in layouts)


def _replace(program: Program, reduce: fx.Node) -> None:
    collective = replace(Collective.of(reduce), target=ops.all_reduce_shard)
    name = f"{collective.unit or 'root'}_{collective.op.name}"
    with program.graph.inserting_before(reduce):
        all_reduce = program.graph.create_node(
            "call_function", collective.target, reduce.args, collective.kwargs, name=name
        )
    all_reduce.meta.update(reduce.meta)
    reduce.replace_all_uses_with(all_reduce)
    program.graph.erase_node(reduce)
