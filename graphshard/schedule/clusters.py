"""Where parameters are used and gradients are ready, and how much compute lies in between."""

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
from graphshard.program.aliases import Source, unpacks, uses_of
from graphshard.program.program import Program
from graphshard.program.storages import bytes_of

T = TypeVar("T")


class Work:
    """The compute of a program in seconds, between any two places of its graph.

    Stale once the graph is edited; one walk to make.
    """

    def __init__(self, program: Program, hardware: Hardware) -> None:
        self.program, self.hardware = program, hardware
        nodes = list(program.graph.nodes)
        self.place: Mapping[fx.Node, int] = {node: index for index, node in enumerate(nodes)}
        seconds = [op_cost(node).seconds(hardware) for node in nodes]
        self._upto = [0.0, *accumulate(seconds)]
        # By unit: the places of its nodes, and its seconds before each of them and after the last.
        self._own: dict[str, tuple[list[int], list[float]]] = {}
        for index, node in enumerate(nodes):
            unit = str(node.meta.get("unit", ""))
            places, upto = self._own.setdefault(unit, ([], [0.0]))
            places.append(index)
            upto.append(upto[-1] + seconds[index])

    def of_others(self, unit: str, start: int, stop: int) -> float:
        """Seconds of compute from place `start` up to `stop` that is not of `unit` itself."""
        places, upto = self._own.get(unit, ([], [0.0]))
        own = upto[bisect_left(places, stop)] - upto[bisect_left(places, start)]
        found = self._upto[stop] - self._upto[start] - own
        return found if found > 1e-12 else 0.0  # differences of sums are not quite zero

    def moved(self, collective: fx.Node, size: int) -> float:
        """Seconds `collective` would take if it moved `size` bytes of full tensors."""
        shape = shape_of(collective, self.program, self.hardware.gpus_per_node)
        return collective_seconds(ops.OPS[collective.target].moves, size, shape, self.hardware)

    def too_small(self, collective: fx.Node, size: int) -> bool:
        """Whether a collective like this one of `size` bytes would be mostly latency."""
        shape = shape_of(collective, self.program, self.hardware.gpus_per_node)
        return size < saturating_bytes(shape, self.hardware, share=0.5)


def readers_of(
    wait: fx.Node, derived: Mapping[fx.Node, Source]
) -> dict[fx.Node, dict[fx.Node, None]]:
    """By full value that `wait` of a gather returned, the nodes that compute with it or with a
    view, cast or copy of it; taking one of those is no use.
    """
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    for value, source in derived.items():
        if source.node.op == "placeholder" or source.node.args[0] is not wait:
            continue
        readers = found.setdefault(source.node, {})
        for user in value.users:
            if user not in derived and user.op == "call_function":
                readers[user] = None
    return found


def last_use(wait: fx.Node) -> fx.Node:
    """The last node that uses a parameter which `wait` of an all_gather returned."""
    return max(wait, *uses_of(*unpacks(wait)))


def clusters(
    items: Iterable[tuple[int, T]],
    gap: Callable[[int, int], float],
    enough: Callable[[Sequence[T]], float],
) -> list[list[T]]:
    """Items with places, in groups that lie far apart, in the order of the places given.

    Args:
        items: each with its place; in the order to be grouped in, places going up or down.
        gap: what lies between two places, the lower one first.
        enough: how much must lie between a group as it stands and the next item to part them;
            never less than something.
    """
    found: list[list[T]] = []
    last = -1
    for place, item in items:
        between = gap(*sorted((last, place))) if found else 0.0
        if not found or (between > 0 and between >= enough(found[-1])):
            found.append([])
        found[-1].append(item)
        last = place
    return found


def bytes_moved(wait: fx.Node, indices: Iterable[int]) -> int:
    """Bytes of the full tensors that the gather behind `wait` gives at `indices`."""
    return sum(bytes_of(wait.meta["val"][index]) for index in set(indices))
