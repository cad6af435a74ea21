"""gather_unused: gather every unit in every program, whichever the step uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.format import some_of
from graphshard.planning.layout import Unit
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.edit import entries_by_name, insert_node
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import find_spans, unit_ancestry


@dataclass(frozen=True)
class GatherUnused(Pass):
    """Let each unit read all its parameters where it begins, in forward and in backward.

    So programs that use different units gather all of them, in the order of the plan. A unit that
    the step does not use begins where the next one that it does use begins: in forward the next of
    the plan, in backward the one before.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        forward = _touch(program, plan, FORWARD, plan.units)
        if forward:
            note = f"gathered, and not used by this call: {some_of(forward)}"
            program.notes = (*program.notes, note)
        if program.grad:
            _touch(program, plan, BACKWARD, _backward_order(plan))


def _backward_order(plan: ShardingPlan) -> list[Unit]:
    """The units in reverse, but each ahead of the units inside it, whose backward it encloses."""
    order: list[Unit] = []
    for unit in plan.units:
        around = [plan.unit(fqn) for fqn in unit_ancestry(unit.fqn, plan)[-2:-1]]
        inside = [order.index(outer) + 1 for outer in around if outer in order]
        order.insert(max(inside, default=0), unit)
    return order


def _touch(program: Program, plan: ShardingPlan, phase: str, units: Sequence[Unit]) -> list[str]:
    """Insert the reads of `units`, in the order in which `phase` runs them; returns the unused."""
    spans = find_spans(program, plan)
    entries = entries_by_name(program)
    unused: list[str] = []
    begin = program.first_backward() if phase == FORWARD else program.output_node
    inserted: dict[fx.Node, fx.Node] = {}  # the first read of those at which units begin
    for unit in reversed(units):
        params = [entries[name].node for name in unit.params if name in entries]
        if not params:
            continue
        used = spans.of(unit.fqn, phase)
        if used:
            begin = used[0].first
        else:
            unused.append(unit.fqn)
        with program.graph.inserting_before(inserted.get(begin, begin)):
            inserted[begin] = insert_node(
                program,
                ops.touch,
                (params,),
                name=f"{unit.fqn or 'root'}_touch",
                unit=unit.fqn,
                phase=phase,
            )
    return unused[::-1]
