"""Places where parameters are used and gradients are ready, and the compute between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import fx

from graphshard.cost.collective_cost import collective_seconds, saturating_bytes, shape_of
from graphshard.cost.op_cost import op_cost
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.aliases import ParameterSource, is_view_op, unpacks, uses_of
from graphshard.program.program import Program
from graphshard.program.storages import bytes_of

T = TypeVar("T")


class ComputeTimes:
    """Seconds of compute between any two places of a program's graph.

    Creating it takes one walk over the graph. It is stale once the graph is edited.

    Args:
        program: a finished program.
        hardware: the machine of each rank. None: each operator but a view counts as one second.
    """

    def __init__(self, program: Program, hardware: Hardware | None) -> None:
        self.program, self.hardware = program, hardware
        nodes = list(program.graph.nodes)
        self.place: Mapping[fx.Node, int] = {node: index for index, node in enumerate(nodes)}
        seconds = [_seconds(node, hardware) for node in nodes]
        self._upto = [0.0, *accumulate(seconds)]
        # By unit, the places of its nodes, and its seconds before each of them and after the last.
        self._by_unit: dict[str, tuple[list[int], list[float]]] = {}
        for index, node in enumerate(nodes):
            unit = str(node.meta.get("unit", ""))
            places, upto = self._by_unit.setdefault(unit, ([], [0.0]))
            places.append(index)
            upto.append(upto[-1] + seconds[index])

    def outside_unit(self, unit: str, start: int, stop: int) -> float:
        """Seconds of compute from place `start` up to `stop` that does not belong to `unit`."""
        places, upto = self._by_unit.get(unit, ([], [0.0]))
        of_unit = upto[bisect_left(places, stop)] - upto[bisect_left(places, start)]
        seconds = self._upto[stop] - self._upto[start] - of_unit
        return seconds if seconds > 1e-12 else 0.0  # differences of sums are not exactly zero

    def collective_seconds(self, collective: fx.Node, size: int) -> float:
        """Seconds that `collective` would take to move `size` bytes of full tensors."""
        assert self.hardware is not None
        shape = shape_of(collective, self.program, self.hardware.gpus_per_node)
        return collective_seconds(ops.OPS[collective.target].moves, size, shape, self.hardware)

    def is_latency_bound(self, collective: fx.Node, size: int) -> bool:
        """Whether latency would take over half of the time of a collective of `size` bytes."""
        assert self.hardware is not None
        shape = shape_of(collective, self.program, self.hardware.gpus_per_node)
        return size < saturating_bytes(shape, self.hardware, share=0.5)


def _seconds(node: fx.Node, hardware: Hardware | None) -> float:
    if hardware is None:
        return float(ops.is_compute(node) and not is_view_op(node.target))
    return op_cost(node).seconds(hardware)


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
    gap: Callable[[int, int], float],
    enough: Callable[[Sequence[T]], float],
) -> list[list[T]]:
    """Group `items`, pairs of place and item in order, whose places are near each other.

    `gap` is the distance between two places, the lower one first. A group ends where the distance
    to the next item is positive and at least `enough` of the group.
    """
    groups: list[list[T]] = []
    last = -1
    for place, item in items:
        between = gap(*sorted((last, place))) if groups else 0.0
        if not groups or (between > 0 and between >= enough(groups[-1])):
            groups.append([])
        groups[-1].append(item)
        last = place
    return groups


def bytes_moved(wait: fx.Node, indices: Iterable[int]) -> int:
    """Bytes of the full tensors at `indices` that the gather of `wait` returns."""
    return sum(bytes_of(wait.meta["val"][index]) for index in set(indices))
