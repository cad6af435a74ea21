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
        reshards = _Reshards(self, program, plan, spans)
        spans_by_unit = {
            unit: spans_served(unit, BACKWARD, readers, spans)
            for unit, readers in readers_by_unit(spans).items()
            if plan.unit(unit).options.reshard_ranks
        }
        reshards.insert(
            (unit, name)
            for unit, served in spans_by_unit.items()
            for _, used, _ in served
            for name in used
        )
        gather_in_backward(program, plan, spans, spans_by_unit, reshards.parts)


class _Reshards:
    """Inserts the reshards; `parts` holds them by parameter."""

    def __init__(
        self, owner: PartialReshard, program: Program, plan: ShardingPlan, spans: UnitSpans
    ) -> None:
        self.owner, self.program, self.plan = owner, program, plan
        self.parts: dict[str, fx.Node] = {}
        span_of = {gather: span for span, gather in gathers_by_span(spans).items()}
        self.latest: dict[str, tuple[fx.Node, UnitSpan]] = {}
        for node, source in spans.derived.items():  # in graph order
            if source.node is node and ops.is_unpack(node):
                self.latest[source.param] = node, span_of[ops.collective_of(node)]

    def insert(self, params: Iterable[tuple[str, str]]) -> None:
        """Insert a `reshard` for each (unit, parameter); inner units first where several end."""
        place = {name: index for index, name in enumerate(self.plan.layouts)}
        sites: list[tuple[int, int, int, str, str]] = []
        for unit, name in set(params):
            if name not in self.latest:
                raise PassError(
                    f"pass {self.owner.name}: backward reads {name!r} of unit {unit!r}, which no "
                    "gather in forward has; run the pass after unshard and before regather"
                )
            depth = len(unit_ancestry(unit, self.plan))
            sites.append((self.latest[name][1].stop, -depth, place[name], unit, name))
        for _, _, _, unit, name in sorted(sites):
            full, span = self.latest[name]
            ranks = self.plan.unit(unit).options.reshard_ranks
            assert ranks is not None
            shape = self.plan.layouts[name].over(ranks).shard_shape
            with self.program.graph.inserting_after(end_of(span, self.plan)):
                self.parts[name] = insert_node(
                    self.program,
                    ops.reshard,
                    (full,),
                    {"ranks": ranks, "unit": unit, "param": name},
                    name=f"{name}_part",
                    unit=unit,
                    phase=span.phase,
                    val=fake_like(full.meta["val"], shape),
                )
