"""split_ends: let the first gather of forward and the last reduce of backward go in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.passes.offload_params import COPIED
from graphshard.passes.split_gathers import Piece, Split
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits
from graphshard.program.collective import Collective, operands_of, params_of, wait_of
from graphshard.program.edit import issue_of, note_copies, take_operands
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import find_spans
from graphshard.program.storages import node_bytes
from graphshard.schedule.clusters import readers_of

PARTS = 4
"""The most parts that a collective is split into."""


@dataclass(frozen=True)
class SplitEnds(Pass):
    """Split what no compute can hide: the first gather of forward, the last reduce of backward.

    A step begins with the gathers of the root and of the first other unit, and ends with the reduce
    of the unit whose backward is last. In parts, compute begins when the parameters that it reads
    first are there, and when it ends only the gradients that are ready last remain to be reduced.
    Parts of a gather are issued where the whole was, and freed where it was or earlier. Parts of a
    reduce are issued where their gradients are ready, but behind the reduce before; casts of these
    gradients live for the rest of the unit's backward. The root's reduce stays whole: its gradients
    that are ready early would be kept for the whole of backward.

    Args:
        share: the fewest bytes of a part that one rank stores.
    """

    share: int

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if plan.world_size == 1:
            return
        waits = [wait for wait in gather_waits(program) if wait.meta["phase"] == FORWARD]
        for wait in list(_ends(sorted(waits, key=ops.collective_of))):
            self._split_gather(program, plan, wait)
        if plan.policy.offloads("params"):
            note_copies(program, COPIED, params=True)
        reduces = [node for node in program.nodes(BACKWARD) if ops.is_scatter(node)]
        for wait in _ends(map(wait_of, reversed(reduces))):
            unit = Collective.of(ops.collective_of(wait)).unit
            before = [
                node
                for node in reduces
                if node < ops.collective_of(wait) and Collective.of(node).unit != unit
            ]
            if unit and before:
                self._split_reduce(program, wait, before[-1])

    def _split_gather(self, program: Program, plan: ShardingPlan, wait: fx.Node) -> None:
        spans = find_spans(program, plan)
        readers: dict[Any, list[fx.Node]] = {
            value.args[1]: sorted(nodes) for value, nodes in readers_of(wait, spans.derived).items()
        }
        forward = [n[0] for n in readers.values() if n and n[0].meta["phase"] == FORWARD]
        if not forward or not all(readers.values()):
            return
        # What only backward reads goes with the last part.
        read = {index: min(nodes[0], max(forward)) for index, nodes in readers.items()}
        parts = self._parts(ops.collective_of(wait), read, program)
        if len(parts) > 1:
            pieces = [Piece(0, 0, part, [n for i in part for n in readers[i]]) for part in parts]
            Split(self.name, program, spans, wait).into(pieces)

    def _split_reduce(self, program: Program, wait: fx.Node, before: fx.Node) -> None:
        reduce = ops.collective_of(wait)
        names = params_of(reduce)
        # What was ready before would be stored until the end; it is hidden in any case.
        ready = {i: max(ops.origin(grad), before) for i, grad in enumerate(operands_of(reduce))}
        for part in self._parts(reduce, ready, program, last_first=True)[:0:-1]:
            named = {names[index] for index in part}
            take = (i for i, name in enumerate(params_of(reduce)) if name in named)
            place = max(ready[index] for index in part)
            for node in issue_of(ops.collective_of(take_operands(program, wait, take))):
                place.append(node)
                place = node

    def _parts(
        self,
        collective: fx.Node,
        places: Mapping[int, fx.Node],
        program: Program,
        *,
        last_first: bool = False,
    ) -> list[list[int]]:
        """The operands of `collective`, by index, in groups that are parts, in order of `places`.

        Operands of one place are in one part.
        """
        ranks = 1 if collective.target is ops.all_gather else ranks_of(collective, program)
        sizes = [node_bytes(operand) // ranks for operand in operands_of(collective)]
        least = max(self.share, sum(sizes) // PARTS)
        parts: list[list[int]] = [[]]
        in_order = sorted(places, key=places.__getitem__, reverse=last_first)
        for _, group in groupby(in_order, key=places.__getitem__):
            if sum(sizes[index] for index in parts[-1]) >= least:
                parts.append([])
            parts[-1] += group
        if len(parts) > 1 and sum(sizes[index] for index in parts[-1]) < least:
            parts[-2:] = [[*parts[-2], *parts[-1]]]
        return parts


def _ends(waits: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The first of `waits`: those of the root, and those of the first other unit."""
    ends = {""}
    for wait in waits:
        collective = Collective.of(ops.collective_of(wait))
        if collective.unit and len(ends) == 1:
            ends.add(collective.unit)
        if collective.several_units or collective.unit not in ends:
            return
        yield wait
