"""Places where parameters are used and gradients are ready, and whether units compute between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import fx

from graphshard.program import ops
from graphshard.program.aliases import ParameterSource, is_view_op, unpacks, uses_of
from graphshard.program.program import Program
from graphshard.program.storages import bytes_of

T = TypeVar("T")


class ComputeBetween:
    """Whether units compute between any two places of a program's graph.

    Creating it takes one walk over the graph. It is stale once the graph is edited.
    """

    def __init__(self, program: Program) -> None:
        nodes = list(program.graph.nodes)
        self.place: Mapping[fx.Node, int] = {node: index for index, node in enumerate(nodes)}
        self._all: list[int] = []  # the places of compute but views
        self._by_unit: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            if ops.is_compute(node) and not is_view_op(node.target):
                self._all.append(index)
                self._by_unit.setdefault(node.meta["unit"], []).append(index)

    def others(self, unit: str) -> Callable[[int, int], bool]:
        """Whether another unit than `unit` computes from one place up to another."""

        def count(places: Sequence[int], start: int, stop: int) -> int:
            return bisect_left(places, stop) - bisect_left(places, start)

        own = self._by_unit.get(unit, [])
        return lambda *between: count(self._all, *between) > count(own, *between)


def readers_of(
    wait: fx.Node, derived: Mapping[fx.Node, ParameterSource]
) -> dict[fx.Node, dict[fx.Node, None]]:
    """The compute nodes that read each full value that the `wait` of a gather returns.

    Readers of a view, cast or copy of a value count too, and those nodes themselves do not.
    """
    by_value: dict[fx.Node, dict[fx.Node, None]] = {}
    for full in unpacks(wait):
        readers = by_value.setdefault(full, {})
        values = [full]
        for value in values:  # grows while it is walked
            for user in value.users:
                if user in derived:
                    values.append(user)
                elif user.op == "call_function":
                    readers[user] = None
    return by_value


def last_use(wait: fx.Node) -> fx.Node:
    """The last node that uses a parameter from the `wait` of an all_gather."""
    return max(wait, *uses_of(*unpacks(wait)))


def clusters(
    items: Iterable[tuple[int, T]],
    are_apart: Callable[[int, int], bool],
    is_large: Callable[[Sequence[T]], bool],
) -> list[list[T]]:
    """Group `items`, pairs of place and item in order, whose places are near each other.

    A group ends where it is large and apart from the next item; the lower place is given first.
    """
    groups: list[list[T]] = []
    last = -1
    for place, item in items:
        if not groups or (are_apart(*sorted((last, place))) and is_large(groups[-1])):
            groups.append([])
        groups[-1].append(item)
        last = place
    return groups


def bytes_moved(wait: fx.Node, indices: Iterable[int]) -> int:
    """Bytes of the full tensors at `indices` that the gather of `wait` returns."""
    return sum(bytes_of(wait.meta["val"][index]) for index in set(indices))
