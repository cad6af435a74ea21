"""skip_reshard: keep the units with which backward begins unsharded since forward."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.cost.streams import moved_bytes
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks
from graphshard.program.collective import Collective, params_of
from graphshard.program.edit import insert_node, prune_gather
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program


@dataclass(frozen=True)
class Pair:
    """The last gather of a unit in forward and the first in backward, by their waits."""

    unit: str
    forward: fx.Node
    backward: fx.Node


@dataclass(frozen=True)
class SkipReshard(Pass):
    """Drop the first gather of units with which backward begins, and free forward's in backward.

    This is `reshard_after_forward=False` for them. Freed, such a unit would be gathered again as
    soon as forward ends. Units whose options do not allow it, and those behind them, are left.

    Args:
        together: units that follow the first one stay, too, while one rank stores no more bytes of
            them all than this: backward would gather them in one message.
    """

    together: int = 0

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        chosen = self._with_which_backward_begins(program, plan)
        for pair in chosen:
            _redirect_backward(program, pair)
        if chosen:
            names = [pair.unit for pair in reversed(chosen)]
            stay = f"{', '.join(names)} {'stay' if len(names) > 1 else 'stays'}"
            program.notes = (*program.notes, f"{stay} unsharded from forward to backward")

    def _with_which_backward_begins(self, program: Program, plan: ShardingPlan) -> list[Pair]:
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
            (pair for pair in pairs_of(program).values() if pair.unit),
            key=lambda pair: max(_frees(pair.forward)),
            reverse=True,
        )
        chosen: list[Pair] = []
        size = 0
        for wait, pair in zip(begun, freed, strict=False):
            gather = ops.collective_of(wait)
            size += moved_bytes(gather, program)
            fits = not chosen or size <= self.together * ranks_of(gather, program)
            if pair.backward is not wait or not plan.unit(pair.unit).options.may_stay or not fits:
                break
            chosen.append(pair)
        return chosen


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
    prune_gather(pair.backward)
