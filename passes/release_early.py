"""release_early: free large parameters in backward right behind their last reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks, uses_of
from graphshard.program.edit import insert_node
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, Program
from graphshard.program.storages import node_bytes


@dataclass(frozen=True)
class ReleaseEarly(Pass):
    """Release parameters one by one in backward, ahead of the `free` of their unit.

    Backward last reads a weight to compute the gradient of the input, and then computes the
    gradient of the weight. A release in between lets the gradient take the place of the weight, so
    a unit in backward holds little more than its parameters, instead of twice as much. No
    collective moves.

    Args:
        min_bytes: smaller parameters wait for the `free`.
    """

    min_bytes: int = 128 * 1024
    establishes: ClassVar[Stage] = Stage.RELEASED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        sites: list[tuple[fx.Node, fx.Node]] = []
        for wait in gather_waits(program):
            free = next((user for user in wait.users if user.target is ops.free), None)
            if free is None or free.meta["phase"] != BACKWARD:
                continue
            gather = ops.collective_of(wait)
            if wait.meta["phase"] != BACKWARD and ranks_of(gather, program) == 1:
                continue  # it gives the shards themselves
            for full in unpacks(wait):
                if any(user.target is ops.release for user in full.users):
                    raise PassError(f"pass {self.name}: {full.name} is released already")
                last = max(uses_of(full))
                is_large = node_bytes(full) >= self.min_bytes
                if is_large and last.meta["phase"] == BACKWARD and _computes_between(last, free):
                    sites.append((last, full))
        for last, full in sites:
            with program.graph.inserting_after(last):
                insert_node(
                    program,
                    ops.release,
                    (full,),
                    name=f"{full.name}_release",
                    unit=full.meta["unit"],
                    phase=BACKWARD,
                )


def _computes_between(last: fx.Node, free: fx.Node) -> bool:
    """Whether a compute node stands between the last reader and the free."""
    node = last.next
    while node is not free:
        if ops.is_compute(node):
            return True
        node = node.next
    return False
