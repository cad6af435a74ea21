"""Search for the best order of a program's nodes without changing the program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import Budget, Score
from graphshard.program.pass_protocol import PassLike, apply_passes
from graphshard.program.program import Program
from graphshard.schedule.evaluate import OrderScorer, budget_of, bytes_by_frame, least_bytes
from graphshard.schedule.jobs import JobTable
from graphshard.schedule.list_scheduler import (
    CHAIN,
    MINIMAL,
    NONE,
    OWN,
    ByteTable,
    PlacedOrder,
    Rule,
    place,
)

GAIN = 0.01
"""The fraction of a step's time by which an order must be faster than FSDP's to be taken.

Estimates differ from measured steps by more, and FSDP's order depends on no estimate.
"""

SLACK = 1e-3
"""The fraction of a step's time by which `order_holding_less` may prolong it."""


_LATE = 2.0  # how many times as long as estimated transfers may take

_PRECISION = 64  # the bisection ends within this fraction (1/64) of the bytes held


def order_holding_less(
    order: list[fx.Node],
    seconds: float,
    table: JobTable,
    scorer: OrderScorer,
    limits: ByteTable,
    rule: Rule,
    if_late: float,
) -> tuple[list[fx.Node], Score]:
    """Find the order of at most `seconds` that holds the fewest bytes because of sharding.

    Such bytes are unsharded parameters, gradients to reduce, and buffers of collectives. The search
    is a bisection that begins with `order` and places the jobs of `table` by `rule` within
    `limits`. What it finds takes at most `if_late` seconds if transfers take twice the estimate,
    since compute waits for a gather that was issued just in time and comes late.
    """
    best, score = order, scorer.score(order)
    lifetimes = scorer.lifetimes
    places = lifetimes.places(place(table, Rule(MINIMAL)).order)
    sharding = bytes_by_frame(lifetimes.live(places, sharding=True), places, lifetimes, table)
    others = limits.least - sharding
    most, least = lifetimes.sharding_bytes(order), int(sharding.max())
    while most - least > max(1, most // _PRECISION):
        middle = (most + least) // 2
        allowed = ByteTable(limits.least, torch.minimum(limits.most, others + middle))
        placed = place(table, rule, allowed)
        trial = scorer.score(placed.order)
        sharding_bytes = lifetimes.sharding_bytes(placed.order)
        as_fast = trial.seconds <= seconds and scorer.seconds(placed.order, _LATE) <= if_late
        if as_fast and trial.bytes <= score.bytes and sharding_bytes < most:
            best, score, most = placed.order, trial, sharding_bytes
        else:
            least = middle
    return best, score


_RULES = (Rule(CHAIN), Rule(OWN), Rule(NONE), Rule(CHAIN, False), Rule(OWN, False))


_MAX_TRIES = 3  # placed orders to score exactly, until one keeps the budget


@dataclass(frozen=True)
class BestOrder:
    """The best order found for the nodes of `program`.

    score: its seconds and bytes. changed: whether it differs from the order of the graph. sharding:
    the maximum bytes held at once because of sharding (see `Budget.room`).
    """

    program: Program
    order: list[fx.Node]
    score: Score
    changed: bool
    sharding: int


def best_order(program: Program, plan: ShardingPlan, budget: Budget) -> BestOrder:
    """Find the best order of the nodes of a finished `program`, without changing it.

    The list scheduler tries a few rules, and the best order by simulation that keeps the budget is
    taken if it is faster than the present one by `GAIN`, and as fast where transfers take twice the
    estimate; of the orders that are as fast, the one that holds the fewest bytes because of
    sharding. Else only frees are moved, or nothing. A present order above the budget gives way to
    any that keeps it.
    """
    present = list(program.graph.nodes)
    scorer = OrderScorer.of(program, plan, budget)
    before = scorer.score(present)
    table = JobTable.of(program, budget, scorer.cost)
    least = place(table, Rule(MINIMAL))
    limits = least_bytes(least.order, scorer.lifetimes, table, budget)
    late = longest = math.inf
    if budget.allows(before):
        longest = before.seconds * (1 - GAIN)
        late = scorer.seconds(present, _LATE) * (1 + SLACK)
    for rule, placed in (*_ranked(table, limits)[:_MAX_TRIES], (Rule(), least)):
        chosen, order, score = rule, placed.order, scorer.score(placed.order)
        in_time = score.seconds <= longest and scorer.seconds(order, _LATE) <= late
        if in_time and budget.allows(score):
            break
    if in_time and budget.prefers(score, before):
        # With a `memory_budget`, no time is given up to hold fewer bytes.
        slack = 0.0 if budget.of_policy else SLACK
        longest = max(score.seconds, min(score.seconds * (1 + slack), before.seconds))
        late = min(late, scorer.seconds(order, _LATE) * (1 + SLACK))
        order, score = order_holding_less(order, longest, table, scorer, limits, chosen, late)
    else:
        order = table.with_early_frees(present)
        score = scorer.score(order)
        if not budget.prefers(score, before):
            order, score = present, before
    sharding = scorer.lifetimes.sharding_bytes(order)
    return BestOrder(program, order, score, order is not present, sharding)


def _ranked(table: JobTable, limits: ByteTable) -> list[tuple[Rule, PlacedOrder]]:
    """The placed order of each rule, the best by the walk first."""
    ranked: list[tuple[Rule, PlacedOrder]] = []
    for rule in _RULES:
        placed = place(table, rule, limits)
        score = Score(placed.seconds, placed.bytes)
        at = sum(not score.beats(Score(other.seconds, other.bytes)) for _, other in ranked)
        ranked.insert(at, (rule, placed))
    return ranked


def trial_of(program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> BestOrder:
    """Find the best order of `program` after the passes `rest`, without changing `program`."""
    program = program.copy()
    apply_passes(rest, program, plan)
    return best_order(program, plan, budget_of(program))
