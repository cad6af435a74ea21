"""From a program's regions to minimum cuts: what each value would cost to save or to recompute."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from graphshard.cost.op_cost import FLOPS_PER_BYTE, equivalent_flops
from graphshard.planning.plan import ShardingPlan
from graphshard.program.aliases import alias_inputs, derived_values
from graphshard.program.ops import is_compute
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.storages import RETURNED, Storage, Storages
from graphshard.recompute.min_cut import Choice, CutProblem, Cutter, Value
from graphshard.recompute.regions import (
    Reads,
    Region,
    call_of,
    checkpoints,
    dropped,
    mask_of,
    reads_of_calls,
    recomputable,
    sources,
)

MOST_CHOICES = 16
"""Choices looked for in a region: more would be closer together than what they save is worth."""


@dataclass(frozen=True)
class RegionProblem:
    """One region: what backward reads of it, and the values that come from, by number."""

    reads: Reads
    nodes: tuple[fx.Node, ...]
    problem: CutProblem

    def recomputed(self, choice: Choice) -> frozenset[fx.Node]:
        """The nodes that `choice` issues again; none for one that costs nothing, as views do."""
        if not choice.cost:
            return frozenset()
        return frozenset(self.nodes[index] for index in choice.recomputed)


class Frontiers:
    """The choices of each region; regions of one structure, as alike blocks are, share them."""

    def __init__(self) -> None:
        self._known: dict[CutProblem, tuple[Choice, ...]] = {}

    def of(self, problem: CutProblem) -> tuple[Choice, ...]:
        """From recomputing nothing but views to saving the fewest bytes."""
        if problem not in self._known:
            self._known[problem] = tuple(Cutter(problem).frontier(MOST_CHOICES))
        return self._known[problem]

    def __len__(self) -> int:
        return len(self._known)


def region_problems(
    program: Program, plan: ShardingPlan, targets: Collection[str], storages: Storages
) -> list[RegionProblem]:
    """The problem of every call of `targets` that backward reads something of, in forward order."""
    found = _Build(program, plan, frozenset(targets), storages)
    problems = [found.problem(reads) for reads in reads_of_calls(program, targets)]
    problems = [problem for problem in problems if problem.nodes]
    return sorted(problems, key=lambda problem: storages.place[problem.nodes[-1]])


@dataclass
class _Build:
    program: Program
    plan: ShardingPlan
    targets: frozenset[str]
    storages: Storages

    def _region(self, node: fx.Node) -> Region | None:
        return None if checkpoints(node) else call_of(node, self.targets)

    @cached_property
    def _free(self) -> frozenset[fx.Node]:
        """What backward has anyway: views of parameters, and all made of those gathered again."""
        return frozenset(
            node
            for node, source in derived_values(self.program, self.plan).items()
            if self.plan.unit(source.unit).options.reshard or not self.storages.of_node.get(node)
        )

    @cached_property
    def _kept(self) -> frozenset[int]:
        """Storages kept whatever a region does: read from outside it, returned, or by several."""
        kept = {id(s) for s in self.storages.all if s.kind == RETURNED}
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
                        kept.add(id(storage))
                    elif outside:
                        readers.setdefault(id(storage), set()).add(region)
        return frozenset(kept | {key for key, regions in readers.items() if len(regions) > 1})

    def problem(self, reads: Reads) -> RegionProblem:
        needed = dict.fromkeys(
            value
            for values in reads.by_user.values()
            for value in values
            if not self._is_free(value)
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
        outside: dict[tuple[int, ...], int] = {}  # by storages: views of one are one value
        chosen: list[fx.Node] = []
        for node in nodes:
            index = len(chosen)
            if self._region(node) != reads.region:
                key = tuple(id(storage) for storage in self.storages.of_node.get(node, ()))
                index = outside.setdefault(key, index)
            number[node] = index
            if index == len(chosen):
                chosen.append(node)
        values = [
            Value(
                tuple(sorted({number[source] for source in inputs[node]})),
                self._size(node, self._region(node) == reads.region, node in needed),
                self._cost(node) if self._region(node) == reads.region else None,
            )
            for node in chosen
        ]
        wanted = frozenset(number[value] for value in needed)
        return RegionProblem(reads, tuple(chosen), CutProblem(tuple(values), wanted))

    def _is_free(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self._free:
            return True
        if isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            return not self.storages.of_node.get(node) and not is_compute(node)
        return True

    def _inputs(self, node: fx.Node, region: Region) -> list[fx.Node]:
        if self._region(node) != region or not recomputable(node):
            return []
        needs = sources(node)
        dropout = dropped(node)
        if dropout is not None and (mask := mask_of(dropout)) is not None:
            needs = [*needs, mask]
        return [source for source in needs if not self._is_free(source)]

    def _size(self, node: fx.Node, inside: bool, needed: bool) -> int | None:
        own = list(_own(node, self.storages)) if inside else self.storages.of_node.get(node, ())
        several = not isinstance(node.meta.get("val"), Tensor)
        if inside and (not own or (several and not needed)):
            return None
        return sum(0 if id(storage) in self._kept else storage.size for storage in own)

    def _cost(self, node: fx.Node) -> int | None:
        if not recomputable(node):
            return None
        if dropped(node) is not None:  # its input times the mask, read and written
            own = _own(node, self.storages)
            return 2 * FLOPS_PER_BYTE * sum(storage.size for storage in own)
        return equivalent_flops(node)


def _own(node: fx.Node, storages: Storages) -> Iterator[Storage]:
    """The storages that `node` makes, or that the operator made whose result it picks out."""
    source = node.args[0] if node.args and not alias_view(node) else None
    for storage in storages.of_node.get(node, ()):
        if storage.node is node or storage.node is source:
            yield storage


def alias_view(node: fx.Node) -> bool:
    """Whether `node` is a view operator (picking out one of several results is none)."""
    return bool(alias_inputs(node)) and getattr(node.target, "_schema", None) is not None


def forward_cost(program: Program) -> int:
    """FLOPs of all of forward, by `graphshard.cost.op_cost.equivalent_flops`."""
    return sum(equivalent_flops(node) for node in program.nodes(FORWARD) if is_compute(node))
