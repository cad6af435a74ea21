"""merge_gathers: let neighbouring small units share gathers and reduces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from graphshard.cost.collective_cost import saturating_bytes, shape_of
from graphshard.cost.streams import moved_bytes
from graphshard.cost.timeline import timeline_of
from graphshard.passes.by_cost import ByCost
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks
from graphshard.program.edit import join_gathers, join_reduces
from graphshard.program.pass_protocol import PassLike
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.schedule.clusters import last_use
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import BestOrder, trial_of

SHARES = (0.5, 0.75, 0.9)
"""Limits to try: sizes at which this share of a collective's time is bandwidth, not latency."""


ROOM = 0.6
"""The share of the sharding memory of FSDP's order that merging may use at no price."""


@dataclass(frozen=True)
class MergeGathers(ByCost):
    """Merge the gathers of units that run one after the other, and their reduces.

    Every collective pays latency for each hop, so many small collectives waste the network.
    Neighbours are merged while their bytes together stay within a limit. Merged parameters are
    freed together, where the last of their units ends, and full gradients wait for the last of
    them. Nothing is merged if no collective is exposed. Otherwise the limits at which bandwidth
    exceeds latency are tried, and the one with the fastest scheduled step within the budget is
    chosen; see README.md for the price of memory.

    Args:
        limit: the most bytes of full tensors in a merged collective. None chooses it.
    """

    limit: int | None = None

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        limit = self._choose_limit(program, plan, rest) if self.limit is None else self.limit
        if limit:
            _merge_gathers(program, limit)
            _merge_reduces(program, limit)

    def _choose_limit(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> int:
        """The best limit; 0 if merging gains nothing."""
        budget = budget_of(program)
        plain = trial_of(program, plan, rest, fewest_bytes=True)
        room = max(plain.sharding, int(ROOM * budget.room))
        best = plain.score
        chosen, collectives = 0, _collective_names(program)
        for limit in _limits(plain, plan):
            trial = program.copy()
            replace(self, limit=limit).apply(trial, plan)
            if _collective_names(trial) == collectives:
                continue
            collectives = _collective_names(trial)
            merged = trial_of(trial, plan, rest, fewest_bytes=True)
            score = merged.score
            if not budget.allows(score):
                continue
            time_saved = 1 - score.seconds / plain.score.seconds
            if not budget.of_policy and merged.sharding - room > time_saved * budget.bytes:
                continue
            if score.seconds < best.seconds and score.beats(best):
                best, chosen = score, limit
        program.budget = replace(budget, best=best)
        return chosen


def _collective_names(program: Program) -> list[str]:
    """The names of the collectives, which differ if programs are merged differently."""
    return [node.name for node in program.nodes() if ops.is_collective(node)]


def _limits(plain: BestOrder, plan: ShardingPlan) -> list[int]:
    """Bytes at which a collective uses the network well; empty if none is exposed."""
    program, nodes = plain.program, plain.order
    hardware = budget_of(program).hardware
    exposed = {
        transfer.span.place
        for transfer in timeline_of(program, plan, hardware, order=nodes).transfers
        if transfer.exposed
    }
    shapes = {
        shape_of(nodes[place], program, hardware.gpus_per_node)
        for place in exposed
        if ops.is_collective(nodes[place])
    }
    return sorted(
        {saturating_bytes(shape, hardware, share) for shape in shapes for share in SHARES} - {0}
    )


def _merge_gathers(program: Program, limit: int) -> None:
    for phase in (FORWARD, BACKWARD):
        waits = [wait for wait in gather_waits(program) if wait.meta["phase"] == phase]
        for group in _groups(waits, program, limit, _can_merge):
            for wait in group[1:]:
                join_gathers(program, group[0], wait)


def _groups(
    waits: Sequence[fx.Node],
    program: Program,
    limit: int,
    can_merge: Callable[[fx.Node, fx.Node], bool],
) -> Iterator[list[fx.Node]]:
    """Groups of neighbouring collectives to merge, by their waits."""
    group: list[fx.Node] = []
    size = 0
    for wait in sorted(waits, key=ops.collective_of):
        bytes_moved = moved_bytes(ops.collective_of(wait), program)
        if group and size + bytes_moved <= limit and can_merge(wait, group[-1]):
            group.append(wait)
            size += bytes_moved
            continue
        yield group
        group, size = [wait], bytes_moved
    yield group


def _can_merge(wait: fx.Node, before: fx.Node) -> bool:
    """Whether the gather of `wait` can merge with that of `before`, and is used after it."""
    signatures = [
        {key: value for key, value in ops.collective_of(each).kwargs.items() if key in _SIGNATURE}
        for each in (before, wait)
    ]
    frees = [user for each in (before, wait) for user in each.users if user.target is ops.free]
    if signatures[0] != signatures[1] or len(frees) != 2:
        return False
    if any(end.meta["phase"] != wait.meta["phase"] for end in frees):
        return False
    return last_use(before) < min(
        (user for node in unpacks(wait) for user in node.users), default=before
    )


_SIGNATURE = ("group", "ranks", "in_place")


def _merge_reduces(program: Program, limit: int) -> None:
    scatters = [n for n in program.nodes(BACKWARD) if n.target is ops.reduce_scatter]
    waits = [wait for reduce in scatters for wait in reduce.users]
    for group in _groups(waits, program, limit, lambda wait, before: True):
        for before, wait in pairwise(group):
            join_reduces(program, before, wait)
