"""Turn the regions of a program into minimum cuts: the price to save or recompute each value."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
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


class Frontiers:
    """The choices of each region, computed once for regions of equal structure."""

    def __init__(self) -> None:
        self._by_problem: dict[CutProblem, tuple[Choice, ...]] = {}

    def of(self, problem: CutProblem) -> tuple[Choice, ...]:
        """The choices of `problem`, from recomputing only views to saving the fewest bytes."""
        if problem not in self._by_problem:
            self._by_problem[problem] = tuple(Cutter(problem).frontier(MOST_CHOICES))
        return self._by_problem[problem]

    def __len__(self) -> int:
        return len(self._by_problem)


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
    source = node.args[0] if node.args and not is_view(node) else None
    for storage in storages.of_node.get(node, ()):
        if storage.node is node or storage.node is source:
            yield storage


def is_view(node: fx.Node) -> bool:
    """Whether `node` is a view operator; selecting one of several results is not."""
    return bool(alias_inputs(node)) and getattr(node.target, "_schema", None) is not None


def forward_cost(program: Program) -> int:
    """FLOPs of forward, by `graphshard.cost.op_cost.equivalent_flops`."""
    return sum(equivalent_flops(node) for node in program.nodes(FORWARD) if is_compute(node))
