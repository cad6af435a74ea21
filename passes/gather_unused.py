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
    the plan, in backward the one before. In backward a unit is read if one of its parameters, or
    one that the model registers before, is trained: no gradient goes to the others.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        spans = find_spans(program, plan)
        unused = [
            unit.fqn for unit in plan.units if unit.params and not spans.of(unit.fqn, FORWARD)
        ]
        if unused:
            note = f"gathered, and not used by this call: {some_of(unused)}"
            program.notes = (*program.notes, note)
        _touch(program, plan, FORWARD, plan.units)
        if program.grad:
            flags = [param.requires_grad for param in program.params]
            trained = flags.index(True) if any(flags) else len(flags)
            passed = {name for param in program.params[trained:] for name in param.names}
            units = [unit for unit in _backward_order(plan) if not passed.isdisjoint(unit.params)]
            _touch(program, plan, BACKWARD, units)


def _backward_order(plan: ShardingPlan) -> list[Unit]:
    """The units in reverse, but each ahead of the units inside it, whose backward it encloses."""
    order: list[Unit] = []
    for unit in plan.units:
        around = [plan.unit(fqn) for fqn in unit_ancestry(unit.fqn, plan)[-2:-1]]
        inside = [order.index(outer) + 1 for outer in around if outer in order]
        order.insert(max(inside, default=0), unit)
    return order


def _touch(program: Program, plan: ShardingPlan, phase: str, units: Sequence[Unit]) -> None:
    """Insert the reads of `units`, which are in the order in which `phase` runs them."""
    spans = find_spans(program, plan)
    entries = entries_by_name(program)
    place = program.first_backward() if phase == FORWARD else program.output_node
    inserted: dict[fx.Node, fx.Node] = {}  # by the node at which a unit begins
    for unit in reversed(units):
        params = [entries[name].node for name in unit.params if name in entries]
        if not params:
            continue
        begin = next((span.first for span in spans.of(unit.fqn, phase)), None)
        before = place if begin is None else inserted.get(begin, begin)
        with program.graph.inserting_before(before):
            place = insert_node(
                program,
                ops.touch,
                (params,),
                name=f"{unit.fqn or 'root'}_touch",
                unit=unit.fqn,
                phase=phase,
            )
        if begin is not None:
            inserted[begin] = place
