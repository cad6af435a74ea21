"""insert_free: free gathered parameters where the span that last uses them ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, unpacks
from graphshard.program.collective import Collective
from graphshard.program.edit import insert_free
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
    """Free each gather at the end of the span of its unit that uses it last.

    The `free` stands at the end of the span, not behind the last use in it: FSDP frees a module's
    parameters when its forward or backward is over. Where several units end together, inner ones
    are freed (and reduced) before outer ones.
    """

    establishes: ClassVar[Stage] = Stage.FREED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        spans = find_spans(program, plan)
        last_use = _last_uses(spans)
        resharded = _spans_resharded(spans)
        sites: list[tuple[int, int, UnitSpan, fx.Node]] = []
        for wait in gather_waits(program):
            if Collective.of(ops.collective_of(wait)).in_place:
                continue
            unit = wait.meta["unit"]
            if any(user.target is ops.free for user in wait.users):
                raise PassError(f"pass {self.name}: {wait.name} of unit {unit!r} is freed already")
            use = last_use.get(wait)
            span = resharded.get(wait) if use is None else spans.around(unit, use)
            if span is None:
                where = "never used" if use is None else f"used by {use.name}"
                raise PassError(
                    f"pass {self.name}: {wait.name} of unit {unit!r} is {where}, outside every "
                    "span of its unit, so there is no place to free it"
                )
            sites.append((span.stop, -len(unit_ancestry(unit, plan)), span, wait))
        sites.sort(key=lambda site: site[:2])
        for _, _, span, wait in sites:
            reshards = [
                user for node in unpacks(wait) for user in node.users if user.target is ops.reshard
            ]
            insert_free(program, wait, after=max([end_of(span, plan), *reshards]))


def _last_uses(spans: UnitSpans) -> dict[fx.Node, fx.Node]:
    """By wait, the last node that reads its results or a value derived from them."""
    last_use: dict[fx.Node, fx.Node] = {}
    for value, source in spans.derived.items():
        if source.node.op == "placeholder":
            continue
        wait = source.node.args[0]
        assert isinstance(wait, fx.Node)
        for user in value.users:
            if user.op != "call_function" or user.target is ops.reshard:
                continue
            latest = last_use.get(wait)
            if latest is None or spans.position[user] > spans.position[latest]:
                last_use[wait] = user
    return last_use


def _spans_resharded(spans: UnitSpans) -> dict[fx.Node, UnitSpan]:
    """By wait whose parameters a `reshard` reads, the span that it was gathered for."""
    return {
        wait: span
        for span, gather in gathers_by_span(spans).items()
        for wait in gather.users
        if any(user.target is ops.reshard for node in unpacks(wait) for user in node.users)
    }
