"""form_regions: group the compute between communication into regions to compile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import begins_replay
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
from graphshard.torch_private.random_ops import may_draw, may_move_generators
from graphshard.torch_private.unbacked import is_unbacked

LEAST = 2
"""The fewest operators of a region, without views."""


@dataclass(frozen=True)
class FormRegions(Pass):
    """Number the regions of a finished program; see `graphshard.program.regions`.

    A region is a maximal sequence of nodes of one unit that can be compiled. It ends with the unit,
    so a forward without communication still has one region for each block. A sequence with fewer
    than two operators is no region, since there is nothing to fuse. Nodes that read a symbolic
    size off an input move to the front of the program, since compiled code needs every symbol.
    Nodes that save or set random states move away from the draws, to where a region would end.
    Nothing else moves. A release between two nodes of a region belongs to the region. Operators
    that draw random numbers join a region if this torch's Inductor draws the same numbers as eager.
    Operators on tensors whose sizes depend on values stay outside.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        _sizes_first(program)
        _states_apart(program)
        forming = _Forming(program)
        for node in program.graph.nodes:
            node.meta.pop(REGION, None)
            if node.op == "call_function":
                forming.visit(node)
        forming.close()
        program.regions = table_of(program.graph, program.nodes())


class _Forming:
    """Forms regions in one walk over the nodes, and numbers each when it is complete."""

    def __init__(self, program: Program) -> None:
        nodes = size_nodes(program.graph)
        self.symbol_of = {node: symbol for symbol, node in nodes.items()}
        # Symbols that have a node before the current one.
        self.symbols = {s for s, node in nodes.items() if node.op == "placeholder"}
        self.fixed = program.sizes is None  # no size is symbolic
        self.takes_random = draws_as_eager()
        self.number = 0
        self.inside: dict[fx.Node, None] = {}
        self.releases: list[fx.Node] = []  # between nodes of the region
        self.behind: list[fx.Node] = []  # releases behind the last node of the region
        self.scope: tuple[str, str] | None = None  # unit and phase of the region

    def visit(self, node: fx.Node) -> None:
        """Add `node` to the current region, end the region before it, or skip the node."""
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
        if source is not None or is_size(node):  # skipped, unless it needs a result of the region
            if ops.is_unpack(node) or any(n in self.inside for n in node.all_input_nodes):
                self.close()
            return
        scope = (node.meta["unit"], node.meta["phase"])
        joins = may_join(node) and self._knows_sizes(node)
        joins = joins and self._takes_draw(node)
        if not joins or scope != self.scope:
            self.close()
        if joins:
            self.scope = scope
            self.inside[node] = None
            self.releases += self.behind
            self.behind = []

    def _takes_draw(self, node: fx.Node) -> bool:
        """Whether the order of draws stays with `node` in a region; Inductor orders tagged ones."""
        return not may_draw(node) or (self.takes_random and ops.is_random(node))

    def close(self) -> None:
        """End the current region, and number it if it has enough operators."""
        if sum(map(works, self.inside)) >= LEAST:
            for node in (*self.inside, *self.releases):
                node.meta[REGION] = self.number
            self.number += 1
        self.inside, self.scope = {}, None
        self.releases, self.behind = [], []

    def _knows_sizes(self, node: fx.Node) -> bool:
        """Whether every symbol in the operands and results of `node` has a node before it.

        A size that depends on values may be 0 or 1, for which compiled code is not made.
        """
        if self.fixed:
            return True
        vals = [value.meta.get("val") for value in (node, *node.all_input_nodes)]
        symbols = [symbol for val in vals for symbol in symbols_of(val)]
        return all(symbol in self.symbols and not is_unbacked(symbol) for symbol in symbols)


def _sizes_first(program: Program) -> None:
    """Move the nodes that read a symbolic size off an input before all compute."""
    if program.sizes is None:
        return
    ends = {node for node in program.graph.nodes if node.op == "placeholder"}
    first = next(iter(program.nodes()))
    for node in size_nodes(program.graph).values():
        if node is not first and node not in ends and ends.issuperset(node.all_input_nodes):
            first.prepend(node)


def _states_apart(program: Program) -> None:
    """Move the nodes that save or set random states to the borders of compute.

    A state is saved and set ahead of the compute of the unit that draws first, and put back behind
    the compute that draws last, unless other draws stand between.
    """
    for node in list(program.nodes()):
        if node.target not in ops.RANDOM_STATES:
            continue
        backwards = node.target is ops.save_random_state or begins_replay(node)
        border = _border(node, backwards=backwards)
        if border is not None and backwards:
            border.append(node)
        elif border is not None:
            border.prepend(node)


def _border(state: fx.Node, *, backwards: bool) -> fx.Node | None:
    """The first node beyond the compute around `state`; None if other draws stand between."""
    node = state.prev if backwards else state.next
    scope = state.meta["unit"], state.meta["phase"]
    while (
        node.op == "call_function"
        and (node.meta["unit"], node.meta["phase"]) == scope
        and ops.is_compute(node)
    ):
        if may_move_generators(node):
            return None
        node = node.prev if backwards else node.next
    return None if node.target in ops.RANDOM_STATES else node
