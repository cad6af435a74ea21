"""all_reduce_small: units with few bytes of gradients are averaged by one all_reduce."""

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
    """Put `all_reduce_shard` in place of each `reduce_scatter` of fewer than `below` bytes.

    A ring reduce_scatter takes a step for each rank; an all_reduce sums along a tree, in the
    logarithm of that. Small gradients pay latency, so the fewer steps win although twice the bytes
    move. The bytes are those of the full gradients in the dtype they are reduced in.
    """

    below: int

    def __post_init__(self) -> None:
        if self.below < 1:
            raise PassError(f"pass {self.name}: below must be 1 byte or more; got {self.below}")

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
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
    arguments = replace(Collective.of(reduce), target=ops.all_reduce_shard)
    name = f"{arguments.unit or 'root'}_{arguments.op.name}"
    with program.graph.inserting_before(reduce):
        whole = program.graph.create_node(
            "call_function", arguments.target, reduce.args, arguments.kwargs, name=name
        )
    whole.meta.update(reduce.meta)
    reduce.replace_all_uses_with(whole)
    program.graph.erase_node(reduce)
