"""insert_free: unsharded parameters are freed where the run that last uses them ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks
from graphshard.program.collective import Collective
from graphshard.program.edit import insert_node
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import Program
from graphshard.program.spans import (
    UnitSpan,
    UnitSpans,
    end_of,
    find_spans,
    gathers_by_span,
    unit_ancestry,
)


@dataclass(frozen=True)
class InsertFree(Pass):
    """Free what each gather holds at the end of the unit's run that uses it last.

    The end of the run, not the last use in it, as a module's parameters are freed when its forward
    or its backward is over. Where several units end together the inner ones are freed, and reduced,
    before the outer ones.
    """

    establishes: ClassVar[Stage] = Stage.FREED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: what a gather returned is freed already, never used, or used outside the runs
                of its unit.
        """
        spans = find_spans(program, plan)
        last_use = _last_uses(spans)
        kept = _only_kept(spans)
        sites: list[tuple[int, int, UnitSpan, fx.Node]] = []
        for wait in gather_waits(program):
            if Collective.of(ops.collective_of(wait)).in_place:
                continue
            unit = wait.meta["unit"]
            if any(user.target is ops.free for user in wait.users):
                raise PassError(f"pass {self.name}: {wait.name} of unit {unit!r} is freed already")
            use = last_use.get(wait)
            run = kept.get(wait) if use is None else spans.around(unit, use)
            if run is None:
                where = "never used" if use is None else f"used by {use.name}"
                raise PassError(
                    f"pass {self.name}: {wait.name} of unit {unit!r} is {where}, outside every run "
                    "of its unit, so no place to free it is known"
                )
            sites.append((run.stop, -len(unit_ancestry(unit, plan)), run, wait))
        sites.sort(key=lambda site: site[:2])
        for _, _, run, wait in sites:
            parts = [
                user for node in unpacks(wait) for user in node.users if user.target is ops.reshard
            ]
            with program.graph.inserting_after(max([end_of(run, plan), *parts])):
                insert_node(
                    program,
                    ops.free,
                    (wait,),
                    {},
                    name=f"{run.unit or 'root'}_free",
                    unit=run.unit,
                    phase=run.phase,
                    val=None,
                )


def _last_uses(spans: UnitSpans) -> dict[fx.Node, fx.Node]:
    """By wait, the last node that reads what it returned or anything derived from that."""
    found: dict[fx.Node, fx.Node] = {}
    for value, source in spans.derived.items():
        if source.node.op == "placeholder":
            continue
        wait = source.node.args[0]
        assert isinstance(wait, fx.Node)
        for user in value.users:
            if user.op != "call_function" or user.target is ops.reshard:
                continue
            best = found.get(wait)
            if best is None or spans.position[user] > spans.position[best]:
                found[wait] = user
    return found


def _only_kept(spans: UnitSpans) -> dict[fx.Node, UnitSpan]:
    """By wait of which parts are kept for backward, the run it was gathered for."""
    return {
        wait: run
        for run, gather in gathers_by_span(spans).items()
        for wait in gather.users
        if any(user.target is ops.reshard for node in unpacks(wait) for user in node.users)
    }
