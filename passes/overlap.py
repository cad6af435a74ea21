"""overlap: communication stands where it costs the least time that the byte budget allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import Program
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import best_order

_KEPT = "FSDP's order is kept, as no other was found to be faster or smaller"


@dataclass(frozen=True)
class Overlap(Pass):
    """Place every gather, wait, free and reduce by estimated times, within the budget.

    Gathers are issued as late as still hides them; reduces are launched where their last operand is
    computed and waited for where they are done; values are freed behind their last use. Gathers
    keep their order among each other, and reduces theirs. Copies of activations to the host and
    back stay among compute where they are; those of shards are issued with the gather before.

    The order is the best that `graphshard.schedule.search` finds. Among orders that take as long it
    is the one that holds the fewest bytes of unsharded parameters, gradients to reduce and buffers.
    If no order is better than FSDP's, the program stays as it is and notes that.
    """

    establishes: ClassVar[Stage] = Stage.SCHEDULED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: the program has no budget; see `SetBudget`.
        """
        budget = budget_of(program)
        best = best_order(program, plan, budget, fewest_bytes=True)
        kept = None if best.changed else _KEPT
        program.budget = replace(budget, kept=kept, best=best.score, sharding=best.sharding)
        if not best.changed:
            return
        end = program.output_node
        for node in best.order:
            if node is not end:
                end.prepend(node)
