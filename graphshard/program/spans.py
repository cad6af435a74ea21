"""Unit spans: the stretches of the program in which a unit is at work.

A unit is at work at its own compute nodes, at those of units nested in it, and at nodes of other
units that read its parameters. Two such nodes belong to one span unless between them stands a node
of a unit that is neither nested in this one nor around it. So code of the root between two uses of
a block does not end the block's span, but a sibling block does, and the root has one span for each
phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import ParameterSource, derived_values
from graphshard.program.collective import Collective
from graphshard.program.program import BACKWARD, FORWARD, Program


@dataclass(frozen=True)
class UnitSpan:
    """One span of one unit.

    first, last: its first and its last compute node. start, stop: their positions in the graph.
    """

    unit: str
    phase: str
    first: fx.Node
    last: fx.Node
    start: int
    stop: int


@dataclass(frozen=True)
class UnitSpans:
    """All spans of a program, and the maps they were computed from; stale after an edit."""

    in_order: tuple[UnitSpan, ...]  # by first node; the outer first where several start
    position: Mapping[fx.Node, int]  # of every node of the graph
    derived: Mapping[fx.Node, ParameterSource]
    by_unit: Mapping[tuple[str, str], tuple[UnitSpan, ...]]  # (unit, phase)

    def of(self, unit: str, phase: str) -> tuple[UnitSpan, ...]:
        """The spans of `unit` in `phase`, in order."""
        return self.by_unit.get((unit, phase), ())

    def steps(self, phase: str) -> list[fx.Node]:
        """The first node of each step of `phase`; a step starts wherever a span does."""
        return list(dict.fromkeys(span.first for span in self.in_order if span.phase == phase))

    def around(self, unit: str, node: fx.Node) -> UnitSpan | None:
        """The span of `unit` that contains `node`; None if there is none."""
        place = self.position[node]
        for span in self.of(unit, node.meta["phase"]):
            if span.start <= place <= span.stop:
                return span
        return None


def assign_units(program: Program, plan: ShardingPlan) -> None:
    """Set the unit of every node of `program`, and its mesh shape and ignored parameters.

    Writes meta["unit"], the innermost unit around meta["fqn"], on every node but the output.
    """
    program.params = tuple(
        replace(param, ignored=True) if plan.layouts[param.fqn].ignored else param
        for param in program.params
    )
    unit_of: dict[str, str] = {}
    program.mesh_shape = plan.mesh_shape
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        fqn = node.meta.get("fqn", "")
        if fqn not in unit_of:
            unit_of[fqn] = plan.unit_of_module(fqn)
        node.meta["unit"] = unit_of[fqn]


def find_spans(program: Program, plan: ShardingPlan) -> UnitSpans:
    """Compute all spans of `program` in one walk."""
    derived = derived_values(program, plan)
    position = {node: place for place, node in enumerate(program.graph.nodes)}
    ancestry = cache(lambda unit: unit_ancestry(unit, plan))
    open_spans: dict[str, tuple[fx.Node, fx.Node]] = {}  # by unit, the first and the last node
    spans: list[UnitSpan] = []
    phase = FORWARD
    touched: dict[str, None] = {}
    latest: object = None

    def close(*units: str) -> None:
        for unit in units:
            first, last = open_spans.pop(unit)
            spans.append(UnitSpan(unit, phase, first, last, position[first], position[last]))

    for node in filter(ops.is_compute, program.graph.nodes):
        if node.meta["phase"] != phase:
            close(*open_spans)
            phase = node.meta["phase"]
        unit, read = node.meta["unit"], _read_units(node, derived)
        if (unit, read) != latest:  # else what is open stays so
            latest = unit, read
            touched = dict.fromkeys((*ancestry(unit), *read))
            for other in list(open_spans):
                if other not in touched and not plan.is_nested(other, unit):
                    close(other)
        for name in touched:
            first, _ = open_spans.get(name, (node, node))
            open_spans[name] = first, node

    close(*open_spans)
    spans.sort(key=lambda span: (span.start, -span.stop, len(span.unit), span.unit))
    by_unit: dict[tuple[str, str], list[UnitSpan]] = {}
    for span in spans:
        by_unit.setdefault((span.unit, span.phase), []).append(span)
    return UnitSpans(
        tuple(spans), position, derived, {key: tuple(value) for key, value in by_unit.items()}
    )


def unit_ancestry(unit: str, plan: ShardingPlan) -> tuple[str, ...]:
    """`unit` and the units around it, from the root inwards."""
    chain = [unit]
    while chain[-1]:
        chain.append(plan.unit_of_module(chain[-1].rpartition(".")[0]))
    return tuple(reversed(chain))


def end_of(span: UnitSpan, plan: ShardingPlan) -> fx.Node:
    """The last node of a span, with the frees and reduces of inner units that follow it."""
    node = span.last
    while _ends(node.next, span, plan):
        node = node.next
    return node


def _ends(node: fx.Node, span: UnitSpan, plan: ShardingPlan) -> bool:
    """Whether `node` frees, reduces or accumulates for a unit inside the span's, or reshards."""
    if node.op != "call_function" or ops.is_compute(node) or node.meta["phase"] != span.phase:
        return False
    if node.target in ops.RANDOM_STATES:
        return False
    unit = node.meta["unit"]
    if node.target is ops.reshard:
        return plan.is_nested(unit, span.unit)
    if ops.is_transfer(node):
        if ops.origin(node).op == "placeholder":  # a shard on its way to a gather
            return False
    elif (
        node.target not in (ops.free, ops.accumulate_grad)
        and ops.collective_of(node).target is ops.all_gather
    ):
        return False
    return unit != span.unit and plan.is_nested(unit, span.unit)


def gathers_by_span(spans: UnitSpans) -> dict[UnitSpan, fx.Node]:
    """The all_gather that serves each span, where both are in the same phase."""
    first_reader: dict[fx.Node, fx.Node | None] = {}
    for node, source in spans.derived.items():
        if source.node is not node or not ops.is_unpack(node):
            continue
        gather = ops.collective_of(node)
        first_reader.setdefault(gather, None)
        for reader in node.users:
            if not ops.is_compute(reader) or reader.meta["phase"] != gather.meta["phase"]:
                continue
            earliest = first_reader[gather]
            if earliest is None or spans.position[reader] < spans.position[earliest]:
                first_reader[gather] = reader
    gather_of: dict[UnitSpan, fx.Node] = {}
    for gather, first in first_reader.items():
        unit = Collective.of(gather).unit
        if first is not None:
            span = spans.around(unit, first)
        else:  # gathered in forward, read in backward only
            later = spans.of(unit, gather.meta["phase"])
            span = next((r for r in later if r.start > spans.position[gather]), None)
        if span is not None:
            gather_of[span] = gather
    return gather_of


Served = tuple[UnitSpan, set[str], list[fx.Node]]
"""A span, the parameters of its unit used in it, and the nodes in it that read them, in order."""


def readers_by_unit(spans: UnitSpans) -> dict[str, list[fx.Node]]:
    """By unit, the compute nodes that read a full parameter or a value derived from one.

    Outer units come first, so that the outer unit's gather is the first of those issued at one
    node.
    """
    readers: dict[str, dict[fx.Node, None]] = {}
    for value, source in spans.derived.items():
        for user in value.users:
            if user.op == "call_function" and user.meta["phase"] in (FORWARD, BACKWARD):
                readers.setdefault(source.unit, {})[user] = None
    place = spans.position
    outer_first = sorted(readers, key=lambda unit: unit.count(".") + bool(unit))
    return {unit: sorted(readers[unit], key=place.__getitem__) for unit in outer_first}


def params_read(
    readers: Iterable[fx.Node], derived: Mapping[fx.Node, ParameterSource], unit: str
) -> set[str]:
    """Parameters of `unit` that `readers` compute with; views of parameters do not count."""
    return {
        derived[value].param
        for node in readers
        if node not in derived
        for value in node.all_input_nodes
        if value in derived and derived[value].unit == unit
    }


def spans_served(unit: str, phase: str, readers: list[fx.Node], spans: UnitSpans) -> list[Served]:
    """The spans of `unit` in `phase` in which a parameter of the unit is used."""
    served: list[Served] = []
    place = spans.position
    rest = iter([node for node in readers if node.meta["phase"] == phase])
    node = next(rest, None)
    for span in spans.of(unit, phase):
        inside: list[fx.Node] = []
        while node is not None and place[node] <= span.stop:
            if place[node] >= span.start:
                inside.append(node)
            node = next(rest, None)
        params = params_read(inside, spans.derived, unit)
        if params:
            served.append((span, params, inside))
    return served


def _read_units(node: fx.Node, derived: Mapping[fx.Node, ParameterSource]) -> list[str]:
    """Units whose parameters `node` reads.

    A view of a parameter that is not gathered yet does not count: it may stand far from the code
    that needs it, and is derived again at that code.
    """
    units: list[str] = []
    for value in node.all_input_nodes:
        source = derived.get(value)
        if source is not None and (node not in derived or source.node.op != "placeholder"):
            units.append(source.unit)
    return units
