"""The search for the best order of a program's nodes; the program itself stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import Budget, Score
from graphshard.program.pass_protocol import PassLike, apply_passes
from graphshard.program.program import Program
from graphshard.schedule.evaluate import OrderScorer, budget_of
from graphshard.schedule.jobs import Tasks
from graphshard.schedule.list_scheduler import CHAIN, MINIMAL, NONE, OWN, Bytes, Placed, Rule, place
from graphshard.schedule.memory import bytes_by_frame, least_bytes

SLACK = 1e-3
"""The part of a step's time by which a order_holding_less order may take longer."""


_NEAR = 64  # the bisection ends within such a part of what is held


def order_holding_less(
    order: list[fx.Node],
    seconds: float,
    tasks: Tasks,
    scorer: OrderScorer,
    held: Bytes,
    rule: Rule,
) -> tuple[list[fx.Node], Score]:
    """An order as fast as allowed that holds the fewest bytes because of sharding, by bisection.

    Such bytes are unsharded parameters, gradients to reduce, and buffers of collectives.

    Args:
        order: of all nodes.
        seconds: how long an order may take.
        tasks: what is placed.
        scorer: gives the seconds and the bytes of an order.
        held: what the list scheduler may take without this.
        rule: how it decides.
    """
    found, score = order, scorer.score(order)
    lifetimes = scorer.lifetimes
    places = lifetimes.places(place(tasks, Rule(MINIMAL)).order)
    own = bytes_by_frame(lifetimes.live(places, sharding=True), places, lifetimes, tasks)
    others = held.least - own
    most, least = lifetimes.sharding_bytes(order), int(own.max())
    while most - least > most // _NEAR:
        middle = (most + least) // 2
        placed = place(tasks, rule, Bytes(held.least, torch.minimum(held.most, others + middle)))
        trial = scorer.score(placed.order)
        bytes_now = lifetimes.sharding_bytes(placed.order)
        if trial.seconds <= seconds and trial.bytes <= score.bytes and bytes_now < most:
            found, score, most = placed.order, trial, bytes_now
        else:
            least = middle
    return found, score


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

    The list scheduler (`graphshard.schedule.list_scheduler`) tries a few rules, and the best
    order by simulation that keeps the budget is taken. If that is not faster than the present order
    (or as fast and smaller), only frees are moved. With `lean`, the one that holds the fewest bytes
    because of sharding is taken of those as fast.
    """
    as_it_is = list(program.graph.nodes)
    scorer = OrderScorer.of(program, plan, budget)
    before = scorer.score(as_it_is)
    tasks = Tasks.of(program, plan, budget, scorer.cost)
    least = place(tasks, Rule(MINIMAL))
    held = least_bytes(least.order, scorer.lifetimes, tasks, budget)
    for rule, placed in (*_ranked(tasks, held)[:_TRIES], (Rule(), least)):
        chosen = rule
        found, score = placed.order, scorer.score(placed.order)
        if budget.allows(score):
            break
    if not budget.prefers(score, before):
        found = tasks.with_early_frees(as_it_is)
        score = scorer.score(found)
    if not budget.prefers(score, before):
        found, score = as_it_is, before
    if lean:
        # Whoever says how many bytes there are wants time for them.
        slack = 0.0 if budget.of_policy else SLACK
        longest = max(score.seconds, min(score.seconds * (1 + slack), before.seconds))
        found, score = order_holding_less(found, longest, tasks, scorer, held, chosen)
    return Best(found, score, found is not as_it_is, scorer.lifetimes.sharding_bytes(found))


def _ranked(tasks: Tasks, held: Bytes) -> list[tuple[Rule, Placed]]:
    """An order by each rule, those that look best first."""
    found: list[tuple[Rule, Placed]] = []
    for rule in _RULES:
        placed = place(tasks, rule, held)
        score = Score(placed.seconds, placed.bytes)
        at = sum(not score.beats(Score(other.seconds, other.bytes)) for _, other in found)
        found.insert(at, (rule, placed))
    return found


@dataclass(frozen=True)
class Trial:
    """A rewritten copy of a program, its best order with the score of that, and the most bytes that
    it then holds for sharding's sake.
    """

    program: Program
    order: list[fx.Node]
    score: Score
    sharding: int


def scheduled(
    program: Program, plan: ShardingPlan, rest: Sequence[PassLike] = (), *, lean: bool = False
) -> Trial:
    """A trial of `program` after the passes `rest`, in its best order; `program` stays as it is.

    `lean` is that of `best_order`.

    Raises:
        PassError: it has no budget; or from one of `rest`.
    """
    if rest:
        program = program.copy()
    apply_passes(rest, program, plan)
    best = best_order(program, plan, budget_of(program), lean=lean)
    return Trial(program, best.order, best.score, best.sharding)


def tried(
    step: PassLike, program: Program, plan: ShardingPlan, rest: Sequence[PassLike] = ()
) -> Trial | None:
    """A trial of `program` after `step` and then `rest`; None if `step` changes nothing.

    Raises:
        PassError: from a pass; or the program has no budget.
    """
    changed = program.copy()
    step.apply(changed, plan)
    if _form(changed) == _form(program):
        return None
    apply_passes(rest, changed, plan)
    return scheduled(changed, plan)


def _form(program: Program) -> list[tuple[str, str, tuple[str, ...]]]:
    """What tells the nodes of a program from another's that was made from it."""
    return [
        (node.name, str(node.kwargs) if node.kwargs else "", tuple(map(str, node.all_input_nodes)))
        for node in program.graph.nodes
    ]
