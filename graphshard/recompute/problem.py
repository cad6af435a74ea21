"""Choose the values of each region to save or recompute, by minimum cuts.

A region becomes a graph of values with the price to save or recompute each. The choice with the
least bytes saved plus price times cost of recomputation is a minimum cut; over all prices the
choices form a convex hull of (cost, bytes). See README.md.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor, fx

from graphshard.cost.op_cost import FLOPS_PER_BYTE, equivalent_flops
from graphshard.planning.plan import ShardingPlan
from graphshard.program.aliases import derived_values, is_view_op
from graphshard.program.ops import is_compute
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.storages import RETURNED, Storage, Storages
from graphshard.recompute.regions import (
    Reads,
    Region,
    call_of,
    checkpoints,
    dropout_of,
    mask_needs_no_operand,
    mask_of,
    reads_of_calls,
    recomputable,
    redrawn_for,
)

MOST_CHOICES = 16
"""The maximum number of choices per region; more would differ too little to matter."""


@dataclass(frozen=True)
class RegionProblem:
    """One region: its reads by backward, the nodes of its values by number, and its cut problem.

    drawn: the draws that may be repeated.
    """

    reads: Reads
    nodes: tuple[fx.Node, ...]
    problem: CutProblem
    drawn: Container[fx.Node] = ()

    def recomputed(self, choice: Choice) -> frozenset[fx.Node]:
        """The nodes that `choice` recomputes; none if they cost nothing, such as views."""
        if not choice.cost:
            return frozenset()
        nodes = [self.nodes[index] for index in choice.recomputed]
        # A mask is drawn again by its dropout, which is no value of the problem.
        draws = [draw for node in nodes if (draw := redrawn_for(node)) in self.drawn]
        return frozenset((*nodes, *(draw for draw in draws if draw is not None)))


def frontier(problem: CutProblem) -> tuple[Choice, ...]:
    """The choices of `problem`, from recomputing only views to saving the fewest bytes."""
    return tuple(Cutter(problem).frontier(MOST_CHOICES))


def region_problems(
    program: Program,
    plan: ShardingPlan,
    targets: Collection[str],
    storages: Storages,
    drawn: Container[str] = (),
) -> list[RegionProblem]:
    """The problem of every call of `targets` that has values read by backward, in forward order.

    `drawn` names the draws that may be repeated instead of saving their results.
    """
    draws = frozenset(node for node in program.nodes(FORWARD) if node.name in drawn)
    builder = _ProblemBuilder(program, plan, frozenset(targets), storages, draws)
    problems = [builder.problem(reads) for reads in reads_of_calls(program, targets)]
    problems = [problem for problem in problems if problem.nodes]
    return sorted(problems, key=lambda problem: storages.place[problem.nodes[-1]])


@dataclass
class _ProblemBuilder:
    program: Program
    plan: ShardingPlan
    targets: frozenset[str]
    storages: Storages
    drawn: frozenset[fx.Node]

    def _region(self, node: fx.Node) -> Region | None:
        return None if checkpoints(node) else call_of(node, self.targets)

    @cached_property
    def _available(self) -> frozenset[fx.Node]:
        """Views of parameters, and values derived from gathers that backward issues again."""
        return frozenset(
            node
            for node, source in derived_values(self.program, self.plan).items()
            if self.plan.unit(source.unit).options.reshard or not self.storages.of_node.get(node)
        )

    @cached_property
    def _always_saved(self) -> frozenset[int]:
        """Storages saved for any choice: returned, read outside of their region, or by several."""
        saved = {id(s) for s in self.storages.all if s.kind == RETURNED}
        readers: dict[int, set[Region]] = {}
        for node in self.program.nodes():
            backward = node.meta["phase"] == BACKWARD
            region = call_of(node, self.targets) if backward else self._region(node)
            for value in node.all_input_nodes:
                if value.op != "call_function" or value.meta["phase"] != FORWARD:
                    continue
                outside = self._region(value) != region or region is None
                for storage in self.storages.of_node.get(value, ()):
                    if outside and backward:
                        saved.add(id(storage))
                    elif outside:
                        readers.setdefault(id(storage), set()).add(region)
        return frozenset(saved | {key for key, regions in readers.items() if len(regions) > 1})

    def problem(self, reads: Reads) -> RegionProblem:
        """The problem of one region."""
        needed = dict.fromkeys(
            value
            for values in reads.by_user.values()
            for value in values
            if not self._is_available(value)
        )
        inputs: dict[fx.Node, list[fx.Node]] = {}
        stack = list(needed)
        while stack:
            node = stack.pop()
            if node not in inputs:
                inputs[node] = self._inputs(node, reads.region)
                stack.extend(inputs[node])
        nodes = sorted(inputs, key=self.storages.place.__getitem__)
        number: dict[fx.Node, int] = {}
        outside: dict[tuple[int, ...], int] = {}  # by storages, as views of one are one value
        numbered: list[fx.Node] = []
        for node in nodes:
            index = len(numbered)
            if self._region(node) != reads.region:
                key = tuple(id(storage) for storage in self.storages.of_node.get(node, ()))
                index = outside.setdefault(key, index)
            number[node] = index
            if index == len(numbered):
                numbered.append(node)
        values = [
            Value(
                tuple(sorted({number[source] for source in inputs[node]})),
                self._size(node, self._region(node) == reads.region, node in needed),
                self._cost(node) if self._region(node) == reads.region else None,
            )
            for node in numbered
        ]
        numbers = frozenset(number[value] for value in needed)
        return RegionProblem(reads, tuple(numbered), CutProblem(tuple(values), numbers), self.drawn)

    def _is_available(self, node: fx.Node) -> bool:
        """Whether the value of `node` is available in backward for any choice."""
        if node.op != "call_function" or node in self._available:
            return True
        if isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            return not self.storages.of_node.get(node) and not is_compute(node)
        return True

    def _inputs(self, node: fx.Node, region: Region) -> list[fx.Node]:
        if self._region(node) != region or not recomputable(node, self.drawn):
            return []
        draw = redrawn_for(node)
        if draw in self.drawn:
            assert draw is not None
            alone = dropout_of(node) is None and mask_needs_no_operand(draw)
            values = [] if alone else list(draw.all_input_nodes)
        else:
            dropout = dropout_of(node)
            values = list((dropout or node).all_input_nodes)
            if dropout is not None and (mask := mask_of(dropout)) is not None:
                values = [*values, mask]
        return [value for value in values if not self._is_available(value)]

    def _size(self, node: fx.Node, inside: bool, needed: bool) -> int | None:
        storages: Iterable[Storage] = self.storages.of_node.get(node, ())
        if inside:
            storages = list(_allocated_by(node, self.storages))
            several = not isinstance(node.meta.get("val"), Tensor)
            if not storages or (several and not needed):
                return None
        return sum(s.size for s in storages if id(s) not in self._always_saved)

    def _cost(self, node: fx.Node) -> int | None:
        if not recomputable(node, self.drawn):
            return None
        draw = redrawn_for(node)
        if draw is not None and draw in self.drawn:
            return equivalent_flops(draw)
        if dropout_of(node) is not None:  # its input times the mask, read and written
            storages = _allocated_by(node, self.storages)
            return 2 * FLOPS_PER_BYTE * sum(storage.size for storage in storages)
        return equivalent_flops(node)


def _allocated_by(node: fx.Node, storages: Storages) -> Iterator[Storage]:
    """The storages allocated by `node`, or by the operator whose result it selects."""
    source = node.args[0] if node.args and not is_view_op(node.target) else None
    for storage in storages.of_node.get(node, ()):
        if storage.node is node or storage.node is source:
            yield storage


def forward_cost(program: Program) -> int:
    """FLOPs of forward, by `graphshard.cost.op_cost.equivalent_flops`."""
    return sum(equivalent_flops(node) for node in program.nodes(FORWARD) if is_compute(node))


@dataclass(frozen=True)
class Value:
    """One value of a region.

    inputs: numbers of the values it is computed from, all smaller than its own; values that are
    always available in backward are left out. size: bytes to save it; None if it cannot be saved (a
    view, a tuple). cost: FLOPs to compute it again; None if that is forbidden.
    """

    inputs: tuple[int, ...]
    size: int | None
    cost: int | None


@dataclass(frozen=True)
class CutProblem:
    """Values in the order they are computed, and the numbers of those that backward reads."""

    values: tuple[Value, ...]
    needed: frozenset[int]


@dataclass(frozen=True)
class Choice:
    """Numbers of the saved and the recomputed values, with the bytes and the FLOPs of them."""

    saved: frozenset[int]
    recomputed: frozenset[int]
    size: int
    cost: int


class Cutter:
    """Finds minimum cuts of one problem at several prices."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem

    def cut(self, per_byte: int, per_cost: int) -> Choice:
        """The choice with the least `per_byte` x bytes saved + `per_cost` x cost of recomputing."""
        import networkx as nx  # here: it takes long to load, and few policies cut
        from networkx.algorithms.flow import preflow_push

        graph = nx.DiGraph()
        graph.add_nodes_from(("source", "sink"))
        for index, value in enumerate(self.problem.values):
            if value.size is None:
                graph.add_edge((index, "in"), (index, "out"))
            else:
                graph.add_edge((index, "in"), (index, "out"), capacity=per_byte * value.size)
            if value.cost is None:
                graph.add_edge("source", (index, "in"))
            else:
                graph.add_edge("source", (index, "in"), capacity=per_cost * value.cost)
            for source in value.inputs:
                graph.add_edge((source, "out"), (index, "in"))
        for index in self.problem.needed:
            graph.add_edge((index, "out"), "sink")
        _, (_, behind) = nx.minimum_cut(graph, "source", "sink", flow_func=preflow_push)
        return self._choice(behind)

    def _choice(self, behind: set[object]) -> Choice:
        """The values of a cut that the needed values depend on; a cut may have others."""
        values = self.problem.values
        saved: set[int] = set()
        recomputed: set[int] = set()
        stack = list(self.problem.needed)
        while stack:
            index = stack.pop()
            if index in saved or index in recomputed:
                continue
            if (index, "in") in behind:
                recomputed.add(index)
                stack.extend(values[index].inputs)
            else:
                saved.add(index)
        return Choice(
            frozenset(saved),
            frozenset(recomputed),
            sum(values[i].size or 0 for i in saved),
            sum(values[i].cost or 0 for i in recomputed),
        )

    def frontier(self, most: int) -> list[Choice]:
        """Up to `most` choices on the convex hull, from the least cost to the fewest bytes.

        Those in the widest gaps are found first.
        """
        # One above the sum of all sizes, and of all costs.
        all_bytes = 1 + sum(value.size or 0 for value in self.problem.values)
        all_costs = 1 + sum(value.cost or 0 for value in self.problem.values)
        ends = [self.cut(1, all_bytes), self.cut(all_costs, 1)]
        hull = ends if ends[0].size > ends[1].size else ends[:1]
        open_gaps = set(pairwise(hull))
        while open_gaps and len(hull) < most:
            gap = max(open_gaps, key=_area)
            open_gaps.remove(gap)
            left, right = gap
            per_byte, per_cost = right.cost - left.cost, left.size - right.size
            middle = self.cut(per_byte, per_cost)

            def price(choice: Choice, a: int = per_byte, b: int = per_cost) -> int:
                return a * choice.size + b * choice.cost

            if price(middle) < price(left):
                hull.insert(hull.index(right), middle)
                open_gaps |= {(left, middle), (middle, right)}
        return hull


def _area(gap: tuple[Choice, Choice]) -> tuple[int, int, int]:
    left, right = gap
    return ((left.size - right.size) * (right.cost - left.cost), left.size, left.cost)
