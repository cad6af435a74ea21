"""What a program holds at each place when every job holds the least it can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import fx

from graphshard.schedule.budget import Budget
from graphshard.schedule.lists import Bytes
from graphshard.schedule.lives import Lives
from graphshard.schedule.tasks import Tasks


def least_held(order: Sequence[fx.Node], lives: Lives, tasks: Tasks, budget: Budget) -> Bytes:
    """The bytes at each place of the frame in an `order` in which all jobs stand at their least.

    Also writes to each job the bytes it holds from an earlier launch (a gather) or up to a later
    wait (a reduce). What is alive between two nodes of the frame counts at the second.
    """
    places = lives.places(order)
    count = len(places)
    frame = places[[lives.number[node] for node in tasks.frame]]
    owner = np.zeros(count, dtype=np.int64)
    owner[frame] = 1
    # A node's place in the frame is the number of frame nodes before it.
    owner = np.minimum(np.cumsum(owner) - owner, max(0, len(frame) - 1))
    least = np.zeros(max(1, len(frame)), dtype=np.int64)
    np.maximum.at(least, owner, lives.live(places))
    born, dies = lives.spans(places)
    starting, ending = np.zeros((2, count + 2), dtype=np.int64)
    np.add.at(starting, born, lives.size)
    np.add.at(ending, dies, lives.size[: len(dies)])

    def at(nodes: Iterable[fx.Node]) -> np.ndarray:
        return places[[lives.number[node] for node in nodes]]

    for job in tasks.jobs:
        if job.is_gather:
            job.held = int(starting[at((*job.fetch, *job.issue))].sum())
        else:
            job.held = int(ending[at(job.wait[:1])].sum())
    return Bytes(least, budget.bytes)
