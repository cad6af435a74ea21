"""The best order of a program's nodes that is found, without bringing them into it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Budget, Score
from graphshard.schedule.held import least_held
from graphshard.schedule.lists import CHAIN, MINIMAL, NONE, OWN, Placed, Rule, place
from graphshard.schedule.orders import Orders
from graphshard.schedule.tasks import Tasks

_RULES = (Rule(CHAIN), Rule(OWN), Rule(NONE), Rule(CHAIN, False), Rule(OWN, False))
_TRIES = 3  # of orders that look best, until one keeps the budget to the byte


@dataclass(frozen=True)
class Best:
    """An order of all nodes of a program, what it costs, and whether it is another than it was."""

    order: list[fx.Node]
    score: Score
    changed: bool


def best_order(program: Program, plan: ShardingPlan, budget: Budget) -> Best:
    """The best order of the nodes of a finished `program`: its own, if no other is preferred.

    A few rules of the list scheduler (see `graphshard.schedule.lists`) are tried, and the best
    order by simulation is taken that keeps the budget. If that is not faster than what is there (or
    as fast and smaller), only frees are moved.
    """
    as_it_is = list(program.graph.nodes)
    orders = Orders.of(program, plan, budget)
    before = orders.score(as_it_is)
    tasks = Tasks.of(program, plan, budget, orders.cost)
    found = score = None
    for placed in _orders(tasks, orders, budget):
        found, score = placed.order, orders.score(placed.order)
        if budget.allows(score):
            break
    assert found is not None
    assert score is not None
    if not budget.prefers(score, before):
        found = tasks.with_early_frees(as_it_is)
        score = orders.score(found)
    if not budget.prefers(score, before):
        return Best(as_it_is, before, changed=False)
    return Best(found, score, changed=True)


def _orders(tasks: Tasks, orders: Orders, budget: Budget) -> list[Placed]:
    """The orders that look best, the best first; last the one that holds the least."""
    least = place(tasks, Rule(MINIMAL))
    held = least_held(least.order, orders.lives, tasks, budget)
    found: list[Placed] = []
    for rule in _RULES:
        placed = place(tasks, rule, held)
        score = Score(placed.seconds, placed.bytes)
        at = sum(not score.beats(Score(other.seconds, other.bytes)) for other in found)
        found.insert(at, placed)
    return [*found[:_TRIES], least]
