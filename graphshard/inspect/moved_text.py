"""What a schedule by cost moves otherwise than unit by unit, for the plan's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from graphshard import ops
from graphshard.inspect.fold import fold
from graphshard.inspect.units_text import some_of
from graphshard.plan import ShardingPlan
from graphshard.program import BACKWARD, FORWARD, Program
from graphshard.views import gather_waits


def moved_notes(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Which units are gathered or reduced in parts or together, and which stay unsharded, if the
    plan's program is scheduled by cost.
    """
    program = plan.program
    if program is None or program.budget is None:
        return
    for op, verb in ((ops.all_gather, "gathered"), (ops.reduce_scatter, "reduced")):
        found = [node for node in program.nodes() if node.target is op]
        for unit in plan.units:
            parts = _parts(found, unit.fqn)
            if len(parts) > 1:
                told = "; ".join(some_of(part) for part in parts)
                yield "apart", f"{unit.fqn or '(root)'} is {verb} in {len(parts)} parts: {told}"
        together = [node for node in found if "units" in node.kwargs]
        if together:
            most = max(len(set(_units(node))) for node in together)
            times = {1: "once", 2: "twice"}.get(len(together), f"{len(together)} times")
            yield "together", f"{times} neighbours are {verb} together, {most} units at most"
    kept = _kept(program, plan)
    if kept:
        names = [line.name or "(root)" for line in fold([(unit, ()) for unit in kept])]
        yield "unsharded", f"{', '.join(names)} from forward to backward, not gathered again"


def _units(collective: fx.Node) -> Sequence[str]:
    return collective.kwargs.get("units", (collective.kwargs["unit"],))  # type: ignore[return-value]


def _parts(collectives: Sequence[fx.Node], unit: str) -> list[list[str]]:
    """The parameters moved by each of a unit's collectives in one phase, if they are not alike."""
    found: dict[str, dict[tuple[str, ...], None]] = {FORWARD: {}, BACKWARD: {}}
    for node in collectives:
        if "units" not in node.kwargs and node.kwargs["unit"] == unit:
            names: tuple[str, ...] = node.kwargs["params"]  # type: ignore[assignment]
            columns = node.kwargs.get("columns")
            if columns is not None:
                names = tuple(f"columns {columns[0]}:{columns[1]} of {name}" for name in names)  # type: ignore[index]
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
