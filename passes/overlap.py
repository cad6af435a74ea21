"""overlap: communication stands where it costs the least time that the memory budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.frees import with_early_frees
from graphshard.schedule.score import budget_of, score_of

_KEPT = "FSDP's order is kept, as no other was found to be faster or smaller"


@dataclass(frozen=True)
class Overlap:
    """Free each unsharded value right behind its last use, not where its unit's run ends.

    The order of compute, of gathers and of reduces stays. If the order found is not faster (or as
    fast and smaller) by simulation, or passes the budget, the program stays as it is and says so.
    """

    name: str = field(default="overlap", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: the program has no budget; see `SetBudget`.
        """
        budget = budget_of(program)
        as_it_is = list(program.graph.nodes)
        before = score_of(program, plan)
        _stand(program, with_early_frees(program))
        score = score_of(program, plan)
        if not (budget.allows(score) and score.beats(before)):
            _stand(program, as_it_is)
            program.budget = replace(budget, kept=_KEPT)


def _stand(program: Program, order: Sequence[fx.Node]) -> None:
    """Bring the nodes of `program` into `order`."""
    end = program.output_node
    for node in order:
        if node is not end:
            end.prepend(node)
