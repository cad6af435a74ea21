"""form_regions: compute between communication is put together, to be compiled as one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program
from graphshard.program.regions import (
    REGION,
    may_join,
    picks_from,
    size_nodes,
    symbols_of,
    table_of,
    works,
)
from graphshard.program.sizes import is_size
from graphshard.torch_private.inductor import draws_as_eager


@dataclass(frozen=True)
class FormRegions(Pass):
    """Number the regions of a finished program (see `graphshard.program.regions`).

    A region goes as far as nodes of one unit that may be compiled stand together; a unit's end ends
    it too, so that a model whose forward communicates nothing still has a region per block. A
    stretch with a single operator in it stays as it is: there is nothing to fuse. The nodes of
    sizes that stand among or behind their readers' regions move to the front of the program, since
    compiled code needs every symbol; nothing else moves. A release with nodes of a region on both
    sides of it is that region's; any other runs where it stands. Operators that draw random numbers
    are in regions where this torch's Inductor draws the same ones for them.

    Args:
        least: operators, views left out, that a region has at least.
    """

    least: int = 2

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
        _sizes_first(program)
        forming = _Forming(program, self.least)
        for node in program.graph.nodes:
            node.meta.pop(REGION, None)
            if node.op == "call_function":
                forming.visit(node)
        forming.close()
        program.regions = table_of(program.graph, program.nodes())


class _Forming:
    """One walk that puts nodes together, and numbers what came together when it ends."""

    def __init__(self, program: Program, least: int) -> None:
        self.least = least
        nodes = size_nodes(program.graph)
        self.symbol_of = {node: symbol for symbol, node in nodes.items()}
        self.symbols = {s for s, node in nodes.items() if node.op == "placeholder"}  # met so far
        self.fixed = program.sizes is None  # no size is symbolic
        self.takes_random = draws_as_eager()
        self.number = 0
        self.inside: dict[fx.Node, None] = {}
        self.releases: list[fx.Node] = []  # among those inside
        self.behind: list[fx.Node] = []  # releases behind the last of those inside
        self.of: tuple[str, str] | None = None  # the unit and phase

    def visit(self, node: fx.Node) -> None:
        """Add `node` to the region being formed, end that, or let it pass by."""
        if node in self.symbol_of:
            self.symbols.add(self.symbol_of[node])
        if node.target is ops.release:
            if self.inside:
                self.behind.append(node)
            return
        source = picks_from(node)
        if source is not None and source in self.inside:
            self.inside[node] = None
            return
        if source is not None or is_size(node):  # passes by, unless it needs what is inside
            if ops.is_unpack(node) or any(n in self.inside for n in node.all_input_nodes):
                self.close()
            return
        of = (node.meta["unit"], node.meta["phase"])
        joins = may_join(node) and self._knows_sizes(node)
        joins = joins and (self.takes_random or not ops.is_random(node))
        if not joins or of != self.of:
            self.close()
        if joins:
            self.of = of
            self.inside[node] = None
            self.releases += self.behind
            self.behind = []

    def close(self) -> None:
        """Number the nodes that came together, if they are enough."""
        if sum(map(works, self.inside)) >= self.least:
            for node in (*self.inside, *self.releases):
                node.meta[REGION] = self.number
            self.number += 1
        self.inside, self.of = {}, None
        self.releases, self.behind = [], []

    def _knows_sizes(self, node: fx.Node) -> bool:
        """Whether every symbol in what `node` reads and gives has a node of its own before it."""
        if self.fixed:
            return True
        vals = [value.meta.get("val") for value in (node, *node.all_input_nodes)]
        return all(symbol in self.symbols for val in vals for symbol in symbols_of(val))


def _sizes_first(program: Program) -> None:
    """Move the nodes that read a symbol off an input in front of all compute."""
    if program.sizes is None:
        return
    ends = {node for node in program.graph.nodes if node.op == "placeholder"}
    first = next(iter(program.nodes()))
    for node in size_nodes(program.graph).values():
        if node is not first and node not in ends and ends.issuperset(node.all_input_nodes):
            first.prepend(node)
