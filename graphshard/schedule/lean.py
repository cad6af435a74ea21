"""Of orders that take the same time, one in which less is held for sharding's sake at once.

What the budget allows, the list scheduler takes: at places that hold little besides it gathers far
ahead and lets reduces lie, whether or not that hides anything. Here it is given less and less of
that, by bisection, as long as the step does not take longer.
"""

from __future__ import annotations

import torch
from torch import fx

from graphshard.schedule.budget import Score
from graphshard.schedule.held import by_frame
from graphshard.schedule.lists import MINIMAL, Bytes, Rule, place
from graphshard.schedule.orders import Orders
from graphshard.schedule.tasks import Tasks

SLACK = 1e-3
"""The part of a step's time by which a leaner order may take longer."""

_NEAR = 64  # the bisection ends within such a part of what is held


def leaner(
    order: list[fx.Node],
    seconds: float,
    tasks: Tasks,
    orders: Orders,
    held: Bytes,
    rule: Rule,
) -> tuple[list[fx.Node], Score]:
    """An order like `order` that holds the least for sharding's sake; itself, if none holds less.

    Args:
        order: of all nodes.
        seconds: how long an order may take.
        tasks: what is placed.
        orders: scores them.
        held: what the list scheduler may take without this.
        rule: how it decides.
    """
    found, score = order, orders.score(order)
    lives = orders.lives
    places = lives.places(place(tasks, Rule(MINIMAL)).order)
    own = by_frame(lives.live(places, sharding=True), places, lives, tasks)
    others = held.least - own
    most, least = lives.sharding_bytes(order), int(own.max())
    while most - least > most // _NEAR:
        middle = (most + least) // 2
        placed = place(tasks, rule, Bytes(held.least, torch.minimum(held.most, others + middle)))
        trial = orders.score(placed.order)
        bytes_now = lives.sharding_bytes(placed.order)
        if trial.seconds <= seconds and trial.bytes <= score.bytes and bytes_now < most:
            found, score, most = placed.order, trial, bytes_now
        else:
            least = middle
    return found, score
