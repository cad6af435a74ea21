"""merge_gathers: let neighbouring small units share gathers and reduces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from torch import fx

from graphshard.cost.collective_cost import ranks_of, saturating_bytes, shape_of
from graphshard.cost.streams import moved_bytes
from graphshard.cost.timeline import timeline_of
from graphshard.passes.by_cost import ByCost
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks, uses_of
from graphshard.program.collective import Collective
from graphshard.program.edit import issue_of, join_gathers, join_reduces
from graphshard.program.pass_protocol import PassLike
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import find_spans
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import GAIN, BestOrder, trial_of

BANDWIDTH = (0.5, 0.75, 0.9)
"""Sizes to try are those at which bandwidth is this part of a collective's time, not latency."""

ROOM = 0.6
"""The share of the sharding memory of FSDP's order that merging may use at no price."""


@dataclass(frozen=True)
class MergeGathers(ByCost):
    """Merge the gathers of units that run one after the other, and their reduces.

    Every collective pays latency for each hop, so many small collectives waste the network.
    Neighbours are merged while each rank's share of their bytes stays within a limit. Merged
    parameters are freed together, where the last of their units ends, and full gradients wait for
    the last of them. A gather is issued before the compute of the merged one before it.

    Args:
        share: the most bytes of a merged collective that one rank stores. None: if a collective is
            exposed, the shares at which bandwidth exceeds latency are tried, and the one with the
            fastest scheduled step within the budget is taken; see README.md for the price of
            memory.
        forward, backward: the merged gathers ahead that one is issued in each phase.
    """

    share: int | None = None
    forward: int = 0
    backward: int = 0

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        share = self._choose_share(program, plan, rest) if self.share is None else self.share
        if share and plan.world_size > 1:
            merged = [p for p in (FORWARD, BACKWARD) if _merge_gathers(program, plan, p, share)]
            if merged:
                steps = find_spans(program, plan).steps
                ahead = {FORWARD: self.forward, BACKWARD: self.backward}
                for phase in merged:
                    _issue_ahead(program, steps(phase), phase, ahead[phase])
            _merge_reduces(program, share)

    def _choose_share(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> int:
        """The policy's share, or a larger one that saves `GAIN` of the time."""
        budget = budget_of(program)
        plain = trial_of(program, plan, rest)
        room = max(plain.sharding, int(ROOM * budget.room))
        fastest, chosen, collectives = plain.score.seconds, 0, _collective_names(program)
        if usual := plan.policy.bytes_merged(plan.process_group_backend):
            trial = program.copy()
            replace(self, share=usual).apply(trial, plan)
            score = trial_of(trial, plan, rest).score
            if budget.allows(score):
                fastest, chosen, collectives = score.seconds, usual, _collective_names(trial)
        fastest *= 1 - GAIN
        for share in [each for each in _shares(plain, plan) if each > chosen]:
            trial = program.copy()
            replace(self, share=share).apply(trial, plan)
            if _collective_names(trial) == collectives:
                continue
            collectives = _collective_names(trial)
            merged = trial_of(trial, plan, rest)
            score = merged.score
            time_saved = 1 - score.seconds / plain.score.seconds
            dear = merged.sharding - room > time_saved * budget.bytes
            if not budget.allows(score) or (dear and not budget.of_policy):
                continue
            if score.seconds < fastest:
                fastest, chosen = score.seconds, share
        return chosen


def _collective_names(program: Program) -> list[str]:
    """The names of the collectives, which differ if programs are merged differently."""
    return [node.name for node in program.nodes() if ops.is_collective(node)]


def _shares(plain: BestOrder, plan: ShardingPlan) -> list[int]:
    """Bytes of a rank at which a collective uses the network well; empty if none is exposed."""
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
        {
            saturating_bytes(shape, hardware, part) // shape.size
            for shape in shapes
            for part in BANDWIDTH
        }
        - {0}
    )


def _merge_gathers(program: Program, plan: ShardingPlan, phase: str, share: int) -> bool:
    """Merge the gathers of `phase`; returns whether there were any to merge."""

    def can_join(group: list[fx.Node], wait: fx.Node) -> bool:
        """Where a rank may not use what is around a unit, that does not outlive it there."""
        unit, *others = (Collective.of(ops.collective_of(each)).unit for each in (wait, *group))
        nested = any(plan.is_nested(unit, other) for other in others)
        return not (nested and plan.policy.gather_unused) and _one_life(group, wait)

    waits = [wait for wait in gather_waits(program) if wait.meta["phase"] == phase]
    groups = list(_groups(waits, program, share, can_join))
    for first, *others in groups:
        for wait in others:
            join_gathers(program, first, wait)
    return len(groups) < len(waits)


def _issue_ahead(program: Program, steps: Sequence[fx.Node], phase: str, ahead: int) -> None:
    """Issue each gather of `phase` before the one of `steps` that first uses the `ahead` of it."""
    if not ahead:
        return
    waits = sorted(
        (wait for wait in gather_waits(program) if wait.meta["phase"] == phase),
        key=ops.collective_of,
    )
    for place, wait in enumerate(waits):
        used = unpacks(waits[max(0, place - ahead)])
        readers = [user for node in used for user in node.users if ops.is_compute(user)]
        if not readers or min(readers).meta["phase"] != phase:
            continue
        step = bisect_right(steps, min(readers)) - 1
        issue = issue_of(ops.collective_of(wait))
        if step >= 0 and steps[step] < issue[0]:
            for node in issue:
                steps[step].prepend(node)


def _groups(
    waits: Sequence[fx.Node],
    program: Program,
    share: int,
    can_join: Callable[[list[fx.Node], fx.Node], bool],
) -> Iterator[list[fx.Node]]:
    """Groups of neighbouring collectives to merge, by their waits."""
    group: list[fx.Node] = []
    size = 0
    for wait in sorted(waits, key=ops.collective_of):
        collective = ops.collective_of(wait)
        bytes_moved = moved_bytes(collective, program)
        limit = share * ranks_of(collective, program)
        if group and size + bytes_moved <= limit and can_join(group, wait):
            group.append(wait)
            size += bytes_moved
            continue
        if group:
            yield group
        group, size = [wait], bytes_moved
    if group:
        yield group


def _same_ranks(group: list[fx.Node], wait: fx.Node) -> bool:
    """Whether the collectives that the waits end join the same ranks for the same kind of work."""
    first, second = (
        (one.target, one.group, one.ranks, one.in_place)
        for one in (Collective.of(ops.collective_of(each)) for each in (group[0], wait))
    )
    return first == second


def _one_life(group: list[fx.Node], wait: fx.Node) -> bool:
    """Whether the gather of `wait` can be waited for, used and freed with those of `group`.

    Its uses begin where those of the last one have ended, and all are freed in one phase. What
    ranks keep anyway is only waited for together. A unit that runs again is gathered again.
    """
    first, last = group[0], group[-1]
    if not _same_ranks(group, wait) or _freed(last) != _freed(wait):
        return False
    params = [Collective.of(ops.collective_of(each)).params for each in (*group, wait)]
    if not set(params.pop()).isdisjoint(chain(*params)):
        return False
    readers = {user for node in unpacks(wait) for user in node.users}
    begin = min(_in_phase_of(wait, readers), default=last)
    if not _freed(wait):
        return first < begin
    return max(_in_phase_of(wait, uses_of(*unpacks(last))), default=last) < begin


def _in_phase_of(wait: fx.Node, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.meta.get("phase") == wait.meta["phase"]]


def _freed(wait: fx.Node) -> set[str]:
    """The phases in which the results of a gather are freed."""
    return {user.meta["phase"] for user in wait.users if user.target is ops.free}


def _merge_reduces(program: Program, share: int) -> None:
    reduces = [node for node in program.nodes(BACKWARD) if node.target in ops.REDUCES]
    for _, alike in groupby(sorted(reduces, key=_kind), key=_kind):
        waits = [wait for reduce in alike for wait in reduce.users]
        for group in _groups(waits, program, share, lambda group, wait: True):
            if len(group) > 1:
                join_reduces(program, group)


def _kind(reduce: fx.Node) -> tuple[str, str]:
    return Collective.of(reduce).op.name, Collective.of(reduce).group
