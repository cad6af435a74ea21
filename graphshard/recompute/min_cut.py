"""Which values of a region to save: minimum cuts, from saving all to recomputing all that may be.

With a price on recomputation the cheapest choice, by bytes saved plus price times cost, is a
minimum cut; over all prices the choices form a convex hull of (cost, bytes). See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import networkx as nx
from networkx.algorithms.flow import preflow_push


@dataclass(frozen=True)
class Value:
    """One value of a region.

    inputs: numbers of the values it is computed from, smaller than its own; what backward has
    anyway is left out. size: bytes to save it, None if it cannot be (a view, a tuple). cost: of
    computing it again, None if that is forbidden.
    """

    inputs: tuple[int, ...]
    size: int | None
    cost: int | None


@dataclass(frozen=True)
class CutProblem:
    """Values in the order they are computed, and the numbers of those backward reads."""

    values: tuple[Value, ...]
    needed: frozenset[int]


@dataclass(frozen=True)
class Choice:
    """What is saved and what is recomputed, with the bytes and the cost of that."""

    saved: frozenset[int]
    recomputed: frozenset[int]
    size: int
    cost: int


class Cutter:
    """Minimum cuts of one problem at several prices."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem

    @cached_property
    def _bound(self) -> tuple[int, int]:
        """More than all sizes together, and more than all costs."""
        values = self.problem.values
        return (
            1 + sum(v.size for v in values if v.size is not None),
            1 + sum(v.cost for v in values if v.cost is not None),
        )

    def cut(self, per_byte: int, per_cost: int) -> Choice:
        """The choice with the least `per_byte` x bytes saved + `per_cost` x cost of recomputing.

        Raises:
            networkx.NetworkXUnbounded: something needed can neither be saved nor recomputed.
        """
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
        """What is used of a cut: it may hold values that nothing needed is made from."""
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
        """Choices from the least cost to the fewest bytes, none worse than a mix of two others.

        Args:
            most: how many choices at most; of more, those between which most lies are found first.
        """
        all_bytes, all_costs = self._bound
        ends = [self.cut(1, all_bytes), self.cut(all_costs, 1)]
        hull = ends if ends[0].size > ends[1].size else ends[:1]
        open_gaps = set(pairwise(hull))
        while open_gaps and len(hull) < most:
            gap = max(open_gaps, key=_area)
            open_gaps.remove(gap)
            left, right = gap
            per_byte, per_cost = right.cost - left.cost, left.size - right.size
            found = self.cut(per_byte, per_cost)

            def value(choice: Choice, a: int = per_byte, b: int = per_cost) -> int:
                return a * choice.size + b * choice.cost

            if value(found) < value(left):
                hull.insert(hull.index(right), found)
                open_gaps |= {(left, found), (found, right)}
        return hull


def _area(gap: tuple[Choice, Choice]) -> tuple[int, int, int]:
    left, right = gap
    return ((left.size - right.size) * (right.cost - left.cost), left.size, left.cost)
