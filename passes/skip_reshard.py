"""skip_reshard: keep chosen units unsharded from forward to backward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.cost.streams import moved_bytes
from graphshard.cost.timeline import timeline_of
from graphshard.errors import PassError
from graphshard.passes.by_cost import ByCost
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks
from graphshard.program.collective import Collective, params_of
from graphshard.program.edit import insert_node, prune_gather
from graphshard.program.pass_protocol import PassLike
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.storages import new_bytes
from graphshard.schedule.evaluate import budget_of
from graphshard.schedule.search import BestOrder, trial_after, trial_of

MAX_TRIALS = 8
"""The most programs to schedule and simulate for the choice of units."""


@dataclass(frozen=True)
class Pair:
    """The last gather of a unit in forward and the first in backward, by their waits."""

    unit: str
    forward: fx.Node
    backward: fx.Node


@dataclass(frozen=True)
class SkipReshard(ByCost):
    """Drop the first backward gather of chosen units, and free forward's gather in backward.

    This is `reshard_after_forward=False` for the units where it pays. Units whose backward gather
    is exposed are ranked by exposed seconds per byte kept, later ones first among equals. They are
    chosen while the scheduled step gets faster and keeps its budget. Usually these are the last
    blocks, with which backward begins.

    Args:
        units: FQNs of the units to keep unsharded. None chooses them.
        together: keep the units with which backward begins instead, without a simulation, where
            their options allow it: the first, and those that follow it while one rank stores no
            more bytes of them than this. Their gathers would be issued as soon as forward ends.
    """

    units: tuple[str, ...] | None = None
    together: int | None = None

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        pairs = pairs_of(program)
        if self.together is not None:
            chosen = _with_which_backward_begins(program, plan, pairs, self.together)
            if chosen:
                _note(program, [pair.unit for pair in reversed(chosen)])
        elif self.units is None:
            chosen = self._choose(program, plan, list(pairs.values()), rest)
        else:
            missing = [unit for unit in self.units if unit not in pairs]
            if missing:
                raise PassError(
                    f"pass {self.name}: unit {missing[0]!r} is not gathered in forward and again "
                    f"in backward; those that are: {sorted(pairs)}"
                )
            chosen = [pairs[unit] for unit in self.units]
        for pair in chosen:
            _redirect_backward(program, pair)

    def _choose(
        self, program: Program, plan: ShardingPlan, pairs: list[Pair], rest: Sequence[PassLike]
    ) -> list[Pair]:
        budget = budget_of(program)
        if not pairs:
            return []
        plain = trial_of(program, plan, rest)
        best = plain.score
        ranked = self._rank(plain, plan, {pair.unit for pair in pairs})
        chosen: list[str] = []
        step, trials = 1, 0
        while ranked and step and trials < MAX_TRIALS:
            candidates = ranked[:step]
            trial = trial_after(replace(self, units=(*chosen, *candidates)), program, plan, rest)
            assert trial is not None
            score = trial.score
            trials += 1
            if budget.allows(score) and score.seconds < best.seconds and score.beats(best):
                chosen += candidates
                ranked = ranked[step:]
                best, step = score, step * 2
            else:
                step = min(step, len(ranked)) // 2
        if chosen:
            _note(program, chosen)
        program.budget = replace(budget, best=best)
        return [pair for pair in pairs if pair.unit in chosen]

    @staticmethod
    def _rank(plain: BestOrder, plan: ShardingPlan, units: set[str]) -> list[str]:
        """The units whose gather in backward is exposed, the best to keep first."""
        program, nodes = plain.program, plain.order
        hardware = budget_of(program).hardware
        value: dict[str, tuple[float, int]] = {}
        for transfer in timeline_of(program, plan, hardware, order=nodes).transfers:
            span = transfer.span
            gathers = transfer.op == ops.all_gather.__name__ and span.phase == BACKWARD
            if gathers and span.unit in units and transfer.exposed and span.unit not in value:
                size = max(1, new_bytes(nodes[span.place], program))
                value[span.unit] = (-transfer.exposed / size, span.place)
        return sorted(value, key=value.__getitem__)


def pairs_of(program: Program) -> dict[str, Pair]:
    """By unit, its last gather in forward and its first in backward.

    The backward gather has no parameter that the forward one lacks. Gathers into copies that ranks
    keep anyway are left out.
    """
    forward: dict[str, fx.Node] = {}
    pairs: dict[str, Pair] = {}
    for wait in gather_waits(program):
        gather = ops.collective_of(wait)
        unit = Collective.of(gather).unit
        if Collective.of(gather).in_place:
            continue
        if wait.meta["phase"] == FORWARD:
            forward[unit] = wait
        elif unit in forward and unit not in pairs:
            forward_wait = forward[unit]
            if _frees(forward_wait) and _params(wait) <= _params(forward_wait):
                pairs[unit] = Pair(unit, forward_wait, wait)
    return pairs


def _with_which_backward_begins(
    program: Program, plan: ShardingPlan, pairs: dict[str, Pair], together: int
) -> list[Pair]:
    """The units that forward frees last and backward gathers first, in backward's order.

    The root is not among them, whose compute stands between forward and backward.
    """
    if plan.world_size == 1:
        return []
    waits = [wait for wait in gather_waits(program) if wait.meta["phase"] == BACKWARD]
    begun = sorted(
        (wait for wait in waits if Collective.of(ops.collective_of(wait)).unit),
        key=ops.collective_of,
    )
    freed = sorted(
        (pair for pair in pairs.values() if pair.unit),
        key=lambda pair: max(_frees(pair.forward)),
        reverse=True,
    )
    chosen: list[Pair] = []
    size = 0
    for wait, pair in zip(begun, freed, strict=False):
        gather = ops.collective_of(wait)
        size += moved_bytes(gather, program)
        fits = not chosen or size <= together * ranks_of(gather, program)
        if pair.backward is not wait or not plan.unit(pair.unit).options.may_stay or not fits:
            break
        chosen.append(pair)
    return chosen


def _note(program: Program, units: Sequence[str]) -> None:
    stay = f"{', '.join(units)} {'stay' if len(units) > 1 else 'stays'}"
    program.notes = (*program.notes, f"{stay} unsharded from forward to backward")


def _params(wait: fx.Node) -> set[str]:
    return set(params_of(ops.collective_of(wait)))


def _frees(wait: fx.Node) -> list[fx.Node]:
    """Where forward frees what was gathered."""
    users = wait.users
    return [user for user in users if user.target is ops.free and user.meta["phase"] == FORWARD]


def _redirect_backward(program: Program, pair: Pair) -> None:
    """Redirect readers of the backward gather of `pair` to the forward one."""
    graph = program.graph
    names = params_of(ops.collective_of(pair.forward))
    gather = ops.collective_of(pair.backward)
    backward_names = params_of(gather)
    values = {names[node.args[1]]: node for node in unpacks(pair.forward)}  # type: ignore[index]
    for node in unpacks(pair.backward):
        name = backward_names[node.args[1]]  # type: ignore[index]
        if name not in values:
            with graph.inserting_after(pair.forward):
                values[name] = insert_node(
                    program,
                    operator.getitem,
                    (pair.forward, names.index(name)),
                    name=f"{name}_full",
                    unit=pair.unit,
                    phase=FORWARD,
                    val=node.meta["val"],
                )
        node.replace_all_uses_with(values[name])
    for node in [user for user in pair.forward.users if user.target is ops.free]:
        graph.erase_node(node)
    for node in [user for user in pair.backward.users if user.target is ops.free]:
        node.args = (pair.forward,)
    shards = list(gather.all_input_nodes)
    prune_gather(pair.backward)
    for shard in shards:
        if shard.target is ops.reshard and not shard.users:
            graph.erase_node(shard)
