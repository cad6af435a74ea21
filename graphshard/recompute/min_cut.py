"""Choose the values of a region to save or recompute, by minimum cuts.

The choice with the least bytes saved plus price times cost of recomputation is a minimum cut; over
all prices the choices form a convex hull of (cost, bytes). See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


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

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """Upper bounds, one above the sum of all sizes and of all costs."""
        values = self.problem.values
        return (
            1 + sum(v.size for v in values if v.size is not None),
            1 + sum(v.cost for v in values if v.cost is not None),
        )

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
        all_bytes, all_costs = self._bounds
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
