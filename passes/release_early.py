"""release_early: in backward a large parameter goes as soon as nothing reads it any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

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
    """Release parameters one by one in backward, ahead of the free of their unit.

    Backward reads a weight last to carry the gradient on, and makes the weight's own gradient next:
    released in between, the one makes room for the other, and a unit in backward holds little more
    than its parameters instead of those and as many gradients. No collective moves.

    Args:
        min_bytes: what is smaller waits for the free.
    """

    min_bytes: int = 128 * 1024
    establishes: ClassVar[Stage] = Stage.RELEASED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: parameters are released already.
        """
        sites: list[tuple[fx.Node, fx.Node]] = []
        for wait in gather_waits(program):
            free = next((user for user in wait.users if user.target is ops.free), None)
            if free is None or not wait.meta["phase"] == free.meta["phase"] == BACKWARD:
                continue
            for picked in unpacks(wait):
                if any(user.target is ops.release for user in picked.users):
                    raise PassError(f"pass {self.name}: {picked.name} is released already")
                last = max(uses_of(picked))
                if node_bytes(picked) >= self.min_bytes and _makes_something(last, free):
                    sites.append((last, picked))
        for last, picked in sites:
            with program.graph.inserting_after(last):
                insert_node(
                    program,
                    ops.release,
                    (picked,),
                    {},
                    name=f"{picked.name}_release",
                    unit=picked.meta["unit"],
                    phase=BACKWARD,
                    val=None,
                )


def _makes_something(last: fx.Node, free: fx.Node) -> bool:
    """Whether anything is computed between the last reader and the free."""
    node = last.next
    while node is not free:
        if ops.is_compute(node):
            return True
        node = node.next
    return False
