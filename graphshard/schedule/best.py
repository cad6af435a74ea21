"""The best order of a program's nodes that is found, without bringing them into it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Budget, Score
from graphshard.schedule.held import least_held
from graphshard.schedule.lean import SLACK, leaner
from graphshard.schedule.lists import CHAIN, MINIMAL, NONE, OWN, Bytes, Placed, Rule, place
from graphshard.schedule.orders import Orders
from graphshard.schedule.tasks import Tasks

_RULES = (Rule(CHAIN), Rule(OWN), Rule(NONE), Rule(CHAIN, False), Rule(OWN, False))
_TRIES = 3  # of orders that look best, until one keeps the budget to the byte


@dataclass(frozen=True)
class Best:
    """An order of all nodes of a program, what it costs, and whether it is another than it was.

    sharding: the most bytes held at once for sharding's sake (see `Budget.room`).
    """

    order: list[fx.Node]
    score: Score
    changed: bool
    sharding: int


def best_order(program: Program, plan: ShardingPlan, budget: Budget, *, lean: bool = False) -> Best:
    """The best order of the nodes of a finished `program`: its own, if no other is preferred.

    A few rules of the list scheduler (see `graphshard.schedule.lists`) are tried, and the best
    order by simulation is taken that keeps the budget. If that is not faster than what is there (or
    as fast and smaller), only frees are moved. With `lean`, of those that take as long the one is
    taken that holds the least for sharding's sake.
    """
    as_it_is = list(program.graph.nodes)
    orders = Orders.of(program, plan, budget)
    before = orders.score(as_it_is)
    tasks = Tasks.of(program, plan, budget, orders.cost)
    least = place(tasks, Rule(MINIMAL))
    held = least_held(least.order, orders.lives, tasks, budget)
    for rule, placed in (*_ranked(tasks, held)[:_TRIES], (Rule(), least)):
        chosen = rule
        found, score = placed.order, orders.score(placed.order)
        if budget.allows(score):
            break
    if not budget.prefers(score, before):
        found = tasks.with_early_frees(as_it_is)
        score = orders.score(found)
    if not budget.prefers(score, before):
        found, score = as_it_is, before
    if lean:
        # Whoever says how many bytes there are wants time for them.
        slack = 0.0 if budget.of_policy else SLACK
        longest = max(score.seconds, min(score.seconds * (1 + slack), before.seconds))
        found, score = leaner(found, longest, tasks, orders, held, chosen)
    return Best(found, score, found is not as_it_is, orders.lives.sharding_bytes(found))


def _ranked(tasks: Tasks, held: Bytes) -> list[tuple[Rule, Placed]]:
    """An order by each rule, those that look best first."""
    found: list[tuple[Rule, Placed]] = []
    for rule in _RULES:
        placed = place(tasks, rule, held)
        score = Score(placed.seconds, placed.bytes)
        at = sum(not score.beats(Score(other.seconds, other.bytes)) for _, other in found)
        found.insert(at, (rule, placed))
    return found
