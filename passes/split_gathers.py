"""split_gathers: gather and free parameters of a unit separately if they are used far apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.passes.offload_params import COPIED
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import ParameterSource, gather_waits
from graphshard.program.collective import Collective, params_of
from graphshard.program.edit import (
    erase_dead,
    gather_again,
    insert_free,
    note_copies,
    prune_gather,
    rewire,
)
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import UnitSpans, find_spans
from graphshard.schedule.clusters import (
    ComputeBetween,
    bytes_moved,
    clusters,
    last_use,
    readers_of,
)

Use = tuple[int, fx.Node]
"""A parameter, by its index in its gather, and a node that reads it."""


@dataclass
class Piece:
    """Parameters to gather together, and the nodes that read them from that gather."""

    first: int  # the group of uses before which they are gathered
    last: int  # the group of uses after which they are freed
    params: list[int]
    readers: list[fx.Node]


@dataclass(frozen=True)
class SplitGathers(Pass):
    """Give each group of uses of a unit's parameters a gather, a wait and a free of its own.

    Two uses are in different groups if other units compute between them. So the root's embedding is
    freed after its lookup, and the head is gathered while the last block computes, instead of both
    staying in memory for the whole phase. The same holds for any unit with units inside it. A
    parameter used in several groups stays from the first to the last of them.

    Args:
        alone: bytes from which parameters are worth a gather of their own.
        forward, backward: the steps ahead that a later gather is issued in each phase.
    """

    alone: int = 0
    forward: int = 1
    backward: int = 1

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        between = ComputeBetween(program)
        spans = find_spans(program, plan)
        split = False
        for wait in list(gather_waits(program)):
            pieces = self._pieces(wait, between, spans)
            if len(pieces) > 1:
                Split(self.name, program, spans, wait, self.forward, self.backward).into(pieces)
                split = True
                spans = find_spans(program, plan)
        if split and plan.policy.offloads("params"):
            note_copies(program, COPIED, params=True)

    def _pieces(self, wait: fx.Node, between: ComputeBetween, spans: UnitSpans) -> list[Piece]:
        gather = Collective.of(ops.collective_of(wait))
        if gather.several_units:  # merged, as they are small
            return []
        uses: list[tuple[int, Use]] = []
        for value, readers in readers_of(wait, spans.derived).items():
            if not readers:
                return []
            index: int = value.args[1]  # type: ignore[assignment]
            uses += ((between.place[reader], (index, reader)) for reader in readers)
        uses.sort(key=lambda use: (-use[0], use[1][0]))

        def is_large(group: Sequence[Use]) -> bool:
            return bytes_moved(wait, (index for index, _ in group)) >= self.alone

        groups = clusters(uses, between.others(gather.unit), is_large)[::-1]
        by_param: dict[int, Piece] = {}
        for place, group in enumerate(groups):
            for index, reader in sorted(group):
                piece = by_param.setdefault(index, Piece(place, place, [index], []))
                piece.last = place
                piece.readers.append(reader)
        return self._join_small(list(by_param.values()), wait)

    def _join_small(self, pieces: list[Piece], wait: fx.Node) -> list[Piece]:
        """Join pieces with the same lifetime, and small pieces with one that is there meanwhile."""
        by_life: dict[tuple[int, int], Piece] = {}
        for piece in sorted(pieces, key=lambda piece: (piece.first, -piece.last)):
            life = piece.first, piece.last
            longer = [o for o in by_life if o[0] <= piece.first and piece.last <= o[1]]
            params = [i for p in pieces if (p.first, p.last) == life for i in p.params]
            if life not in by_life and longer and bytes_moved(wait, params) < self.alone:
                life = longer[-1]
            if life in by_life:
                by_life[life].params += piece.params
                by_life[life].readers += piece.readers
            else:
                by_life[life] = piece
        return list(by_life.values())


@dataclass
class Split:
    """The rewrite of the gather that `wait` ends, by the pass `name`.

    forward, backward: the steps ahead that pieces but those of the first group are issued.
    """

    name: str
    program: Program
    spans: UnitSpans
    wait: fx.Node
    forward: int = 0
    backward: int = 0

    def into(self, pieces: list[Piece]) -> None:
        """Give each of `pieces` a gather, and erase the one that they were in."""
        gather = ops.collective_of(self.wait)
        for piece in sorted(pieces, key=lambda piece: min(piece.readers)):
            self._insert(piece, gather)
        replaced = {self.wait, *self.wait.users}
        derived = [value for value, source in self.spans.derived.items() if source.node in replaced]
        erase_dead(derived)
        remaining = [user for user in self.wait.users if user.target is not ops.free]
        if remaining:
            raise PassError(
                f"pass {self.name}: {remaining[0].name} of unit "
                f"{Collective.of(gather).unit!r} is still read, by "
                f"{next(iter(remaining[0].users)).name}"
            )
        prune_gather(self.wait)

    def _insert(self, piece: Piece, gather: fx.Node) -> None:
        readers = sorted(set(piece.readers))
        phase = readers[0].meta["phase"]
        wait, values = gather_again(
            self.program,
            self.wait,
            sorted(piece.params),
            issued=gather if not piece.first else self._ahead_of(readers[0]),
            waited=readers[0],
            phase=phase,
        )
        names = params_of(gather)
        by_name = {names[index]: value for index, value in values.items()}
        derived = self._derived_from(names[index] for index in values)
        for phase_read in (FORWARD, BACKWARD):
            in_phase = [reader for reader in readers if reader.meta["phase"] == phase_read]
            rewire(in_phase, derived, by_name, unit=Collective.of(gather).unit)
        if not Collective.of(gather).in_place:
            insert_free(self.program, wait, after=last_use(wait))

    def _derived_from(self, params: Iterable[str]) -> Mapping[fx.Node, ParameterSource]:
        """The values derived from this gather's results for `params`."""
        names = set(params)
        return {
            value: source
            for value, source in self.spans.derived.items()
            if source.param in names and source.node.args and source.node.args[0] is self.wait
        }

    def _ahead_of(self, reader: fx.Node) -> fx.Node:
        """The first node of a step before `reader`, whose compute hides a gather issued there."""
        place, phase = self.spans.position, reader.meta["phase"]
        ahead = self.forward if phase == FORWARD else self.backward
        earlier = [step for step in self.spans.steps(phase) if place[step] < place[reader]]
        return [reader, *reversed(earlier)][min(ahead, len(earlier))]
