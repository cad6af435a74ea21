"""overlap: place communication where the step is fastest within the byte budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import Program
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import best_order

_UNCHANGED = "FSDP's order is kept, as no other was found to be faster by 1 %"


@dataclass(frozen=True)
class Overlap(Pass):
    """Place every gather, wait, free and reduce by estimated times, within the budget.

    Gathers are issued as late as possible while compute still hides them. Reduces are launched
    where their last operand is computed and waited for where they finish. Parameters are freed
    behind their last use. The order of gathers does not change, nor that of reduces. Copies of
    activations stay between the same compute nodes; copies of shards are issued with the gather
    before.

    The order is the best that `graphshard.schedule.search` finds. Among equally fast orders it is
    the one with the lowest peak of unsharded parameters, gradients to reduce and communication
    buffers. If none is faster than FSDP's by 1 %, that stays, and the program's `budget` says so.
    """

    establishes: ClassVar[Stage] = Stage.SCHEDULED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        budget = budget_of(program)
        best = best_order(program, plan, budget)
        reason = None if best.changed else _UNCHANGED
        program.budget = replace(budget, unchanged_because=reason, sharding=best.sharding)
        if not best.changed:
            return
        end = program.output_node
        for node in best.order:
            if node is not end:
                end.prepend(node)
