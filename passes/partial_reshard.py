"""partial_reshard: keep parameters sharded over small groups between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.passes.regather import gather_in_backward
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.edit import (
    fake_like,
    insert_node,
)
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, Program
from graphshard.program.spans import (
    UnitSpan,
    UnitSpans,
    end_of,
    find_spans,
    gathers_by_span,
    readers_by_unit,
    spans_served,
    unit_ancestry,
)


@dataclass(frozen=True)
class PartialReshard(Pass):
    """Gather parameters in backward from a group of k ranks that kept them from forward.

    The pass applies to units with `reshard_after_forward=k`. At the end of the last forward span
    that gathers a parameter, a `reshard` copies one of k parts out of the full value. Backward
    gathers these parts within the k ranks. In exchange 1/k of the unit stays on each rank from
    forward to backward.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if not any(unit.options.reshard_ranks for unit in plan.units):
            return
        spans = find_spans(program, plan)
        spans_by_unit = {
            unit: spans_served(unit, BACKWARD, readers, spans)
            for unit, readers in readers_by_unit(spans).items()
            if plan.unit(unit).options.reshard_ranks
        }
        used = (
            (unit, name)
            for unit, served in spans_by_unit.items()
            for _, names, _ in served
            for name in names
        )
        parts = _insert_reshards(program, plan, spans, used)
        gather_in_backward(program, plan, spans, spans_by_unit, parts)


def _insert_reshards(
    program: Program, plan: ShardingPlan, spans: UnitSpans, params: Iterable[tuple[str, str]]
) -> dict[str, fx.Node]:
    """Insert a `reshard` for each (unit, parameter); inner units first where several end."""
    span_of = {gather: span for span, gather in gathers_by_span(spans).items()}
    latest: dict[str, tuple[fx.Node, UnitSpan]] = {}
    for node, source in spans.derived.items():  # in graph order
        if source.node is node and ops.is_unpack(node):
            latest[source.param] = node, span_of[ops.collective_of(node)]
    place = {name: index for index, name in enumerate(plan.layouts)}
    sites: list[tuple[int, int, int, str, str]] = []
    for unit, name in set(params):
        if name not in latest:
            raise PassError(
                f"backward reads {name!r} of unit {unit!r}, which no gather in forward has; run "
                "the pass after unshard and before regather"
            )
        depth = len(unit_ancestry(unit, plan))
        sites.append((latest[name][1].stop, -depth, place[name], unit, name))
    parts: dict[str, fx.Node] = {}
    for _, _, _, unit, name in sorted(sites):
        full, span = latest[name]
        ranks = plan.unit(unit).options.reshard_ranks
        assert ranks is not None
        shape = plan.layouts[name].over(ranks).shard_shape
        with program.graph.inserting_after(end_of(span, plan)):
            parts[name] = insert_node(
                program,
                ops.reshard,
                (full,),
                {"ranks": ranks, "unit": unit, "param": name},
                name=f"{name}_part",
                unit=unit,
                phase=span.phase,
                val=fake_like(full.meta["val"], shape),
            )
    return parts
