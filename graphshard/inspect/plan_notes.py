"""Notes for a plan on its captured step: memory, and collectives placed by cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from graphshard.format import fold, human_bytes, some_of
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits
from graphshard.program.collective import Collective
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, Program
from graphshard.program.storages import storages_of
from graphshard.program.value_sizes import assumed_text


def memory_dict(program: Program) -> dict[str, Any]:
    """Return bytes saved for backward by unit, the number of recomputed ops, and peak bytes."""
    storages = storages_of(program)
    return {
        "saved_bytes": dict(sorted(storages.saved_by_unit().items())),
        "recomputed_ops": sum(RECOMPUTED in node.meta for node in program.nodes(BACKWARD)),
        "peak_bytes": max(storages.live(), default=0),
    }


def memory_notes(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the facts of `memory_dict` as sentences, each with its title."""
    facts = memory_dict(program)
    saved: dict[str, int] = facts["saved_bytes"]
    if saved:
        each = [
            f"{line.name or '(root)'} {human_bytes(line.facts)}{' each' if line.count > 1 else ''}"
            for line in fold(list(saved.items()))
        ]
        total = human_bytes(sum(saved.values()))
        yield "saved", f"{total} of activations from forward to backward: {some_of(each)}"
    if facts["recomputed_ops"]:
        yield "recomputed", f"{facts['recomputed_ops']:,} operators of forward, again in backward"
    peak = human_bytes(facts["peak_bytes"])
    yield "peak", f"{peak} held at once by a step, besides shards, their gradients and inputs"
    if program.assumed_sizes:
        yield "sizes", assumed_text(program.assumed_sizes)


def moved_notes(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield notes on how a program moves parameters and gradients, each with its title.

    They name units that are gathered or reduced in parts or together, or that stay unsharded.
    """
    program = plan.program
    if program is None:
        return
    for is_of_kind, verb in ((ops.is_gather, "gathered"), (ops.is_scatter, "reduced")):
        collectives = [node for node in program.nodes() if is_of_kind(node)]
        for unit in plan.units:
            parts = _parts(collectives, unit.fqn)
            if len(parts) > 1:
                names = "; ".join(some_of(part) for part in parts)
                yield "apart", f"{unit.fqn or '(root)'} is {verb} in {len(parts)} parts: {names}"
        together = [c for c in map(Collective.of, collectives) if c.several_units]
        if together:
            most = max(len(set(collective.units)) for collective in together)
            times = {1: "once", 2: "twice"}.get(len(together), f"{len(together)} times")
            yield "together", f"{times} neighbours are {verb} together, {most} units at most"
    unsharded = _kept_unsharded(program, plan)
    if unsharded:
        lines = fold([(unit, ()) for unit in unsharded])
        units = ", ".join(line.name or "(root)" for line in lines)
        yield "unsharded", f"{units} from forward to backward, not gathered again"


def _parts(collectives: Sequence[fx.Node], unit: str) -> list[list[str]]:
    """Return the distinct sets of parameters that a unit's collectives move in one phase."""
    by_phase: dict[str, dict[tuple[str, ...], None]] = {FORWARD: {}, BACKWARD: {}}
    for node in collectives:
        collective = Collective.of(node)
        if not collective.several_units and collective.unit == unit:
            by_phase[node.meta["phase"]][collective.params] = None
    parts = by_phase[FORWARD] if len(by_phase[FORWARD]) > 1 else by_phase[BACKWARD]
    return list(map(list, parts))


def _kept_unsharded(program: Program, plan: ShardingPlan) -> list[str]:
    """Return units that are kept from forward to backward although the plan reshards them."""
    units: set[str] = set()
    for wait in gather_waits(program):
        unit = str(wait.meta["unit"])
        freed = [user.meta["phase"] for user in wait.users if user.target is ops.free]
        if plan.unit(unit).options.reshard and [wait.meta["phase"], *freed] == [FORWARD, BACKWARD]:
            units.add(unit)
    return [unit.fqn for unit in plan.units if unit.fqn in units]
