"""What a program holds at each place when every job holds the least it can."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from graphshard.cost.buffers import buffers_of
from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.schedule.budget import Budget
from graphshard.schedule.lists import Bytes
from graphshard.schedule.tasks import Tasks
from graphshard.step_memory import Storage, storages_of


def least_held(program: Program, plan: ShardingPlan, tasks: Tasks, budget: Budget) -> Bytes:
    """The bytes at each place of the frame of `program`, whose jobs stand at their least.

    Also writes to each job the bytes it holds from an earlier launch (a gather) or up to a later
    wait (a reduce). What is alive between two nodes of the frame counts at the second.
    """
    nodes = list(program.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    storages = list(storages_of(program).all)
    if not budget.of_policy:
        storages += buffers_of(program, budget.backend)
    live = _live(storages, len(nodes))
    owner = np.zeros(len(nodes), dtype=np.int64)
    frame = [place[node] for node in tasks.frame]
    owner[frame] = 1
    # A node's place in the frame is the number of frame nodes before it.
    owner = np.minimum(np.cumsum(owner) - owner, max(0, len(frame) - 1))
    least = np.zeros(max(1, len(frame)), dtype=np.int64)
    np.maximum.at(least, owner, live)
    born: dict[int, int] = defaultdict(int)
    dies: dict[int, int] = defaultdict(int)
    for storage in storages:
        born[storage.born] += storage.size
        dies[storage.dies] += storage.size
    for job in tasks.jobs:
        if job.is_gather:
            job.held = sum(born[place[node]] for node in (*job.fetch, *job.issue))
        else:
            job.held = dies[place[job.wait[0]]]
    return Bytes(least, budget.bytes)


def _live(storages: Iterable[Storage], count: int) -> np.ndarray:
    change = np.zeros(count + 1, dtype=np.int64)
    for storage in storages:
        change[storage.born] += storage.size
        if storage.dies < count:
            change[storage.dies + 1] -= storage.size
    return np.cumsum(change[:-1])
