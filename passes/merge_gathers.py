"""merge_gathers: neighbouring units too small for the network share gathers and reduces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphshard.cost.collective_cost import saturating_bytes, shape_of
from graphshard.cost.streams import moved_bytes
from graphshard.cost.timeline import timeline_of
from graphshard.passes.by_cost import ByCost
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks
from graphshard.program.collective import Collective
from graphshard.program.edit import join_gathers, join_reduces
from graphshard.program.pass_protocol import PassLike
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.schedule.clusters import last_use
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import Trial, trial_of

SHARES = (0.5, 0.75, 0.9)
"""Sizes to try, by the part of a collective's time in which bytes move rather than latency pass."""


ROOM = 0.6
"""The part of what FSDP's order holds for sharding's sake that saving latency may take freely."""


@dataclass(frozen=True)
class MergeGathers(ByCost):
    """Merge the gathers of units that run one after the other, and their reduces.

    A collective takes a time for each hop whatever it moves, so many small ones waste the network.
    Neighbours are merged as long as what they move together stays within a limit. Merged
    parameters are freed together, where the last unit among them ends, and full gradients wait for
    the last one's. Where no collective is exposed nothing is merged; else the limits at which
    bandwidth takes over from latency are tried, and of those by which the scheduled step is
    faster within its budget the best is kept. So no gather becomes too large to hide. What is
    merged is there at once. Without a `memory_budget`, what a step then holds for sharding's sake
    beyond `ROOM` of what FSDP's order does, and beyond what it would unmerged, must be bought: a
    part of the budget with as large a part of the time.

    Args:
        limit: the most bytes of full tensors in a merged collective. None: chosen as above.
    """

    limit: int | None = None

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        """See `RehearsingPass.apply_before`.

        Raises:
            PassError: the choice is left to this pass, and the program has no budget.
        """
        limit = self._chosen(program, plan, rest) if self.limit is None else self.limit
        if limit:
            _merge_gathers(program, limit)
            _merge_reduces(program, limit)

    def _chosen(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> int:
        """The best limit; 0 if merging gains nothing."""
        budget = budget_of(program)
        plain = trial_of(program, plan, rest, fewest_bytes=True)
        room = max(plain.sharding, int(ROOM * budget.room))
        best = plain.score
        chosen, seen = 0, _issued(program)
        for limit in _limits(plain, plan):
            trial = program.copy()
            replace(self, limit=limit).apply(trial, plan)
            if _issued(trial) == seen:
                continue
            seen = _issued(trial)
            merged = trial_of(trial, plan, rest, fewest_bytes=True)
            score = merged.score
            if not budget.allows(score):
                continue
            gained = 1 - score.seconds / plain.score.seconds
            if not budget.of_policy and merged.sharding - room > gained * budget.bytes:
                continue
            if score.seconds < best.seconds and score.beats(best):
                best, chosen = score, limit
        program.budget = replace(budget, best=best)
        return chosen


def _issued(program: Program) -> list[str]:
    """The names of the collectives, by which programs merged differently can be told apart."""
    return [node.name for node in program.nodes() if ops.is_collective(node)]


def _limits(plain: Trial, plan: ShardingPlan) -> list[int]:
    """Bytes at which a gather begins to use the network well; none if no gather is exposed."""
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
        for group in _groups(waits, program, limit):
            for wait in group[1:]:
                join_gathers(program, group[0], wait)


def _groups(waits: Sequence[fx.Node], program: Program, limit: int) -> Iterator[list[fx.Node]]:
    """Gathers to be merged, by their waits: of units used one after the other."""
    group: list[fx.Node] = []
    size = 0
    for wait in sorted(waits, key=ops.collective_of):
        own = moved_bytes(ops.collective_of(wait), program)
        if group and size + own <= limit and _follows(wait, group[-1]):
            group.append(wait)
            size += own
            continue
        yield group
        group, size = [wait], own
    yield group


def _follows(wait: fx.Node, before: fx.Node) -> bool:
    """Whether what `wait` returns may be gathered with what `before` does, and is used after it."""
    kinds = [
        {key: value for key, value in ops.collective_of(one).kwargs.items() if key in _KINDS}
        for one in (before, wait)
    ]
    ends = [user for one in (before, wait) for user in one.users if user.target is ops.free]
    if kinds[0] != kinds[1] or len(ends) != 2:
        return False
    if any(end.meta["phase"] != wait.meta["phase"] for end in ends):
        return False
    return last_use(before) < min(
        (user for node in unpacks(wait) for user in node.users), default=before
    )


_KINDS = ("group", "ranks", "in_place")


def _merge_reduces(program: Program, limit: int) -> None:
    group: list[fx.Node] = []
    size = 0
    scatters = [n for n in program.nodes(BACKWARD) if n.target is ops.reduce_scatter]
    for reduce in scatters:
        (wait,) = reduce.users
        own = moved_bytes(reduce, program)
        if Collective.of(reduce).columns is not None:
            group = []
        elif group and size + own <= limit:
            join_reduces(program, group[-1], wait)
            group, size = [wait], size + own
        else:
            group, size = [wait], own
