"""UnitSpans: the spans of the program in which a unit is at work.

A unit's positions are its own compute nodes, those of units nested in it, and nodes of other units
that read its parameters. Two positions belong to one run unless a node between them belongs to a
unit that is neither nested in this one nor around it. So code of the root between two uses of a
block does not end the block's run, a sibling block does, and the root has one run per phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import Source, derived_values
from graphshard.program.collective import Collective
from graphshard.program.program import BACKWARD, FORWARD, Program


@dataclass(frozen=True)
class UnitSpan:
    """One span of one unit: `first` and `last` are compute nodes, `start` and `stop` places."""

    unit: str
    phase: str
    first: fx.Node
    last: fx.Node
    start: int
    stop: int


@dataclass(frozen=True)
class UnitSpans:
    """All runs of a program, and what they were found from. Stale once the graph is edited."""

    in_order: tuple[UnitSpan, ...]  # by first node; of runs that start together, the outer first
    position: Mapping[fx.Node, int]  # of every node of the graph
    derived: Mapping[fx.Node, Source]
    by_unit: Mapping[tuple[str, str], tuple[UnitSpan, ...]]  # (unit, phase)

    def of(self, unit: str, phase: str) -> tuple[UnitSpan, ...]:
        """The runs of `unit` in `phase`, in order."""
        return self.by_unit.get((unit, phase), ())

    def steps(self, phase: str) -> list[fx.Node]:
        """The first node of each step of `phase`: where a unit's run starts, a step does."""
        return list(dict.fromkeys(run.first for run in self.in_order if run.phase == phase))

    def around(self, unit: str, node: fx.Node) -> UnitSpan | None:
        """The run of `unit` that spans `node`, if any."""
        place = self.position[node]
        for run in self.of(unit, node.meta["phase"]):
            if run.start <= place <= run.stop:
                return run
        return None


def assign_units(program: Program, plan: ShardingPlan) -> None:
    """Tell `program` what the plan knows of its nodes and parameters.

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
    """All runs of `program`, in one walk."""
    derived = derived_values(program, plan)
    position = {node: place for place, node in enumerate(program.graph.nodes)}
    ancestry: dict[str, tuple[str, ...]] = {}
    open_spans: dict[str, _OpenSpan] = {}  # by unit
    closed: list[_OpenSpan] = []
    phase = FORWARD

    for node in program.nodes():
        if not ops.is_compute(node):
            continue
        if node.meta["phase"] != phase:
            phase = node.meta["phase"]
            closed += open_spans.values()
            open_spans = {}
        unit = node.meta["unit"]
        if unit not in ancestry:
            ancestry[unit] = unit_ancestry(unit, plan)
        touched = dict.fromkeys((*ancestry[unit], *_read_units(node, derived)))
        for other in list(open_spans):
            if other not in touched and not plan.is_nested(other, unit):
                closed.append(open_spans.pop(other))
        for name in touched:
            if name in open_spans:
                open_spans[name].last = node
            else:
                open_spans[name] = _OpenSpan(name, phase, node, node)

    closed += open_spans.values()
    spans = [
        UnitSpan(s.unit, s.phase, s.first, s.last, position[s.first], position[s.last])
        for s in closed
    ]
    spans.sort(key=lambda run: (run.start, -run.stop, len(run.unit), run.unit))
    by_unit: dict[tuple[str, str], list[UnitSpan]] = {}
    for run in spans:
        by_unit.setdefault((run.unit, run.phase), []).append(run)
    return UnitSpans(
        tuple(spans), position, derived, {key: tuple(value) for key, value in by_unit.items()}
    )


def unit_ancestry(unit: str, plan: ShardingPlan) -> tuple[str, ...]:
    """`unit` and the units around it, the root first."""
    chain = [unit]
    while chain[-1]:
        chain.append(plan.unit_of_module(chain[-1].rpartition(".")[0]))
    return tuple(reversed(chain))


def end_of(run: UnitSpan, plan: ShardingPlan) -> fx.Node:
    """The run's last compute node, or what ends it and the units inside it right after that."""
    node = run.last
    while _ends(node.next, run, plan):
        node = node.next
    return node


def _ends(node: fx.Node, run: UnitSpan, plan: ShardingPlan) -> bool:
    """Whether `node` frees, reduces or keeps for a unit inside the run's, or keeps for its own."""
    if node.op != "call_function" or ops.is_compute(node) or node.meta["phase"] != run.phase:
        return False
    unit = node.meta["unit"]
    if node.target is ops.reshard:
        return plan.is_nested(unit, run.unit)
    if ops.is_transfer(node):
        if ops.origin(node).op == "placeholder":  # of a shard, to be gathered
            return False
    elif (
        node.target not in (ops.free, ops.keep) and ops.collective_of(node).target is ops.all_gather
    ):
        return False
    return unit != run.unit and plan.is_nested(unit, run.unit)


def gathers_by_span(spans: UnitSpans) -> dict[UnitSpan, fx.Node]:
    """The all_gather issued for each run, in the run's own phase."""
    first_reader: dict[fx.Node, fx.Node | None] = {}
    for node, source in spans.derived.items():
        if source.node is not node or not ops.is_unpack(node):
            continue
        gather = ops.collective_of(node)
        first_reader.setdefault(gather, None)
        for reader in node.users:
            if not ops.is_compute(reader) or reader.meta["phase"] != gather.meta["phase"]:
                continue
            best = first_reader[gather]
            if best is None or spans.position[reader] < spans.position[best]:
                first_reader[gather] = reader
    found: dict[UnitSpan, fx.Node] = {}
    for gather, first in first_reader.items():
        unit = Collective.of(gather).unit
        if first is not None:
            run = spans.around(unit, first)
        else:  # gathered in forward, read in backward only
            later = spans.of(unit, gather.meta["phase"])
            run = next((r for r in later if r.start > spans.position[gather]), None)
        if run is not None:
            found[run] = gather
    return found


Served = tuple[UnitSpan, set[str], list[fx.Node]]
"""A run, the parameters of its unit used in it, and the nodes in it that read them, in order."""


def readers_by_unit(spans: UnitSpans) -> dict[str, list[fx.Node]]:
    """Every compute node that reads a full parameter or something derived from one, by unit.

    Outer units come first, so that of gathers issued at one place the outer unit's is the first.
    """
    found: dict[str, dict[fx.Node, None]] = {}
    for value, source in spans.derived.items():
        for user in value.users:
            if user.op == "call_function" and user.meta["phase"] in (FORWARD, BACKWARD):
                found.setdefault(source.unit, {})[user] = None
    place = spans.position
    outer_first = sorted(found, key=lambda unit: unit.count(".") + bool(unit))
    return {unit: sorted(found[unit], key=place.__getitem__) for unit in outer_first}


def params_read(
    readers: Iterable[fx.Node], derived: Mapping[fx.Node, Source], unit: str
) -> set[str]:
    """Parameters of `unit` that `readers` compute with; taking a view of one does not count."""
    return {
        derived[value].param
        for node in readers
        if node not in derived
        for value in node.all_input_nodes
        if value in derived and derived[value].unit == unit
    }


def spans_served(unit: str, phase: str, readers: list[fx.Node], spans: UnitSpans) -> list[Served]:
    """The runs of `unit` in `phase` in which some parameter of it is used."""
    served: list[Served] = []
    place = spans.position
    rest = iter([node for node in readers if node.meta["phase"] == phase])
    node = next(rest, None)
    for run in spans.of(unit, phase):
        inside: list[fx.Node] = []
        while node is not None and place[node] <= run.stop:
            if place[node] >= run.start:
                inside.append(node)
            node = next(rest, None)
        params = params_read(inside, spans.derived, unit)
        if params:
            served.append((run, params, inside))
    return served


@dataclass
class _OpenSpan:
    unit: str
    phase: str
    first: fx.Node
    last: fx.Node


def _read_units(node: fx.Node, derived: Mapping[fx.Node, Source]) -> list[str]:
    """Units whose parameters `node` reads.

    A view of a parameter that nothing has gathered yet does not count: it may stand far from the
    code that needs it, and is derived again where it is needed.
    """
    units: list[str] = []
    for value in node.all_input_nodes:
        source = derived.get(value)
        if source is not None and (node not in derived or source.node.op != "placeholder"):
            units.append(source.unit)
    return units
