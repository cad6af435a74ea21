"""overlap: communication stands where it costs the least time that the byte budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Budget, Score
from graphshard.schedule.held import least_held
from graphshard.schedule.lists import CHAIN, MINIMAL, NONE, OWN, Placed, Rule, place
from graphshard.schedule.score import budget_of, score_of
from graphshard.schedule.tasks import Tasks

_KEPT = "FSDP's order is kept, as no other was found to be faster or smaller"

_RULES = (Rule(CHAIN), Rule(OWN), Rule(NONE), Rule(CHAIN, False), Rule(OWN, False))
_TRIES = 3  # of orders that look best, until one keeps the budget to the byte


@dataclass(frozen=True)
class Overlap:
    """Place every gather, wait, free and reduce by estimated times, within the budget.

    Gathers are issued as late as still hides them; reduces are launched where their last operand is
    computed and waited for where they are done; values are freed behind their last use. Gathers
    keep their order among each other, and reduces theirs. Copies of activations to the host and
    back stay among compute where they are; those of shards are issued with the gather before.

    A few rules of the list scheduler (see `graphshard.schedule.lists`) are tried, the best order by
    simulation is taken that keeps the budget. If that is not faster than what was there (or as fast
    and smaller), only frees are moved; if nothing is gained by that either, the program stays as it
    is and says so.
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
        tasks = Tasks.of(program, plan, budget)
        for placed in _orders(program, plan, tasks, budget):
            _stand(program, placed.order)
            score = score_of(program, plan)
            if budget.allows(score):
                break
        if not budget.prefers(score, before):
            _stand(program, tasks.with_early_frees(as_it_is))
            score = score_of(program, plan)
        if not budget.prefers(score, before):
            _stand(program, as_it_is)
            program.budget = replace(budget, kept=_KEPT)


def _orders(program: Program, plan: ShardingPlan, tasks: Tasks, budget: Budget) -> list[Placed]:
    """The orders that look best, the best first; last the one that holds the least."""
    least = place(tasks, Rule(MINIMAL))
    _stand(program, least.order)
    held = least_held(program, plan, tasks, budget)
    found: list[Placed] = []
    for rule in _RULES:
        placed = place(tasks, rule, held)
        score = Score(placed.seconds, placed.bytes)
        at = sum(not score.beats(Score(other.seconds, other.bytes)) for other in found)
        found.insert(at, placed)
    return [*found[:_TRIES], least]


def _stand(program: Program, order: Sequence[fx.Node]) -> None:
    """Bring the nodes of `program` into `order`."""
    end = program.output_node
    for node in order:
        if node is not end:
            end.prepend(node)
