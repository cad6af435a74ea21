"""What a captured step saves, recomputes and holds, for plans."""

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


def memory_dict(program: Program) -> dict[str, Any]:
    """Bytes saved from forward to backward by unit, operators recomputed, the most bytes held."""
    storages = storages_of(program)
    return {
        "saved_bytes": dict(sorted(storages.saved_by_unit().items())),
        "recomputed_ops": sum(RECOMPUTED in node.meta for node in program.nodes(BACKWARD)),
        "peak_bytes": max(storages.live(), default=0),
    }


def memory_notes(program: Program) -> Iterator[tuple[str, str]]:
    """The same in sentences, each with its title."""
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


def moved_notes(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Which units are gathered or reduced in parts or together, and which stay unsharded, if the
    plan's program is scheduled by cost.
    """
    program = plan.program
    if program is None or program.budget is None:
        return
    for is_of_kind, verb in ((ops.is_gather, "gathered"), (ops.is_scatter, "reduced")):
        found = [node for node in program.nodes() if is_of_kind(node)]
        for unit in plan.units:
            parts = _parts(found, unit.fqn)
            if len(parts) > 1:
                told = "; ".join(some_of(part) for part in parts)
                yield "apart", f"{unit.fqn or '(root)'} is {verb} in {len(parts)} parts: {told}"
        together = [c for c in map(Collective.of, found) if c.several_units]
        if together:
            most = max(len(set(collective.units)) for collective in together)
            times = {1: "once", 2: "twice"}.get(len(together), f"{len(together)} times")
            yield "together", f"{times} neighbours are {verb} together, {most} units at most"
    kept = _kept(program, plan)
    if kept:
        names = [line.name or "(root)" for line in fold([(unit, ()) for unit in kept])]
        yield "unsharded", f"{', '.join(names)} from forward to backward, not gathered again"


def _parts(collectives: Sequence[fx.Node], unit: str) -> list[list[str]]:
    """The parameters moved by each of a unit's collectives in one phase, if they are not alike."""
    found: dict[str, dict[tuple[str, ...], None]] = {FORWARD: {}, BACKWARD: {}}
    for node in collectives:
        collective = Collective.of(node)
        if not collective.several_units and collective.unit == unit:
            names, columns = collective.params, collective.columns
            if columns is not None:
                names = tuple(f"columns {columns[0]}:{columns[1]} of {name}" for name in names)
            found[node.meta["phase"]][names] = None
    parts = found[FORWARD] if len(found[FORWARD]) > 1 else found[BACKWARD]
    return list(map(list, parts))


def _kept(program: Program, plan: ShardingPlan) -> list[str]:
    """Units that are kept from forward to backward although the plan reshards them."""
    found: dict[str, None] = {}
    for wait in gather_waits(program):
        unit = str(wait.meta["unit"])
        freed = [user.meta["phase"] for user in wait.users if user.target is ops.free]
        if plan.unit(unit).options.reshard and [wait.meta["phase"], *freed] == [FORWARD, BACKWARD]:
            found[unit] = None
    return [unit.fqn for unit in plan.units if unit.fqn in found]
