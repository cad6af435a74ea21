"""What a program holds at each place when every job holds the least it can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx

from graphshard.schedule.budget import Budget
from graphshard.schedule.lists import Bytes
from graphshard.schedule.lives import Lives
from graphshard.schedule.tasks import Tasks


def least_held(order: Sequence[fx.Node], lives: Lives, tasks: Tasks, budget: Budget) -> Bytes:
    """The bytes at each place of the frame in an `order` in which all jobs stand at their least.

    Also writes to each job the bytes it holds from an earlier launch (a gather) or up to a later
    wait (a reduce).
    """
    places = lives.places(order)
    count = len(places)
    least = by_frame(lives.live(places), places, lives, tasks)
    born, dies = lives.spans(places)
    starting, ending = torch.zeros((2, count + 2), dtype=torch.int64)
    starting.index_add_(0, born, lives.size)
    ending.index_add_(0, dies, lives.size[: len(dies)])
    for job in tasks.jobs:
        if job.is_gather:
            job.held = int(starting[places[_numbers((*job.fetch, *job.issue), lives)]].sum())
        else:
            job.held = int(ending[places[_numbers(job.wait[:1], lives)]].sum())
    return Bytes(least, torch.full_like(least, budget.bytes))


def by_frame(held: Tensor, places: Tensor, lives: Lives, tasks: Tasks) -> Tensor:
    """The bytes `held` at each place of an order, by place of the frame.

    What is alive between two nodes of the frame counts at the second.
    """
    frame = places[_numbers(tasks.frame, lives)]
    owner = torch.zeros(len(places), dtype=torch.int64)
    owner[frame] = 1
    # A node's place in the frame is the number of frame nodes before it.
    owner = (owner.cumsum(0) - owner).clamp(max=max(0, len(frame) - 1))
    found = torch.zeros(max(1, len(frame)), dtype=torch.int64)
    return found.scatter_reduce_(0, owner, held, "amax")


def _numbers(nodes: Iterable[fx.Node], lives: Lives) -> Tensor:
    return torch.tensor([lives.number[node] for node in nodes], dtype=torch.int64)
