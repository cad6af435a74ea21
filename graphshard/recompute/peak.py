"""The most bytes that a step would hold, for each choice of values that its regions recompute.

The program is not rewritten for it. A region that recomputes a value adds the lifetime of a copy
and ends that of the value earlier. Gathered parameters and full gradients are measured once, on a
copy of the program that went through all passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from graphshard.program.aliases import alias_inputs
from graphshard.program.ops import is_compute
from graphshard.program.program import Program
from graphshard.program.storages import GRADIENTS, PARAMETERS, Storage, Storages, storages_of
from graphshard.recompute.regions import Reads, dropped, mask_of, placed, sources

_AFTER = 1e-7
"""A value is gone this much after the place of its last use; nodes issued again lie further apart,
in the second half of the gap before their reader, and communication in the first half."""


@dataclass(frozen=True)
class ShardingBytes:
    """Bytes of unsharded parameters and full gradients by place, as a step function.

    `apart` names the storages (node and part) that are counted here and not by the places of the
    captured program, and `gone` the nodes of it that the passes took away, such as the casts of
    full parameters and gradients, which are made of shards instead.
    """

    starts: Tensor  # float64, ascending
    sizes: Tensor  # int64
    apart: frozenset[tuple[str, int]]
    gone: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program, rewritten: Program, issued: str) -> ShardingBytes:
        """Measure a program that all passes have rewritten.

        Args:
            program: the program whose places count.
            rewritten: the same with regions recomputed, parameters gathered and gradients reduced.
            issued: the meta key of the nodes issued again.
        """
        place = {node.name: index for index, node in enumerate(program.graph.nodes)}
        storages = storages_of(rewritten)
        counted = [s for s in storages.all if s.kind in (PARAMETERS, GRADIENTS)]
        live = Storages(tuple(counted), storages.of_node, storages.place).live()
        starts, sizes = [-1.0], [0]
        between: list[int] = []
        again = 0  # the most while nodes issued again run that the next captured node needs
        at = -1

        def pass_gap() -> None:
            for step, size in enumerate(between):
                starts.append(at + 0.5 * (step + 1) / (len(between) + 1))
                sizes.append(size)

        for node, size in zip(rewritten.graph.nodes, live, strict=True):
            if issued in node.meta:
                again = max(again, size)
            elif is_compute(node) and node.name in place:
                pass_gap()
                if again:
                    starts.append(place[node.name] - 0.5)
                    sizes.append(max(again, size))
                at = place[node.name]
                starts.append(at)
                sizes.append(size)
                between, again = [], 0
            elif again:
                again = max(again, size)
            else:
                between.append(size)
        pass_gap()
        left = {node.name for node in rewritten.graph.nodes if is_compute(node)}
        return cls(
            torch.tensor(starts, dtype=torch.float64),
            torch.tensor(sizes, dtype=torch.int64),
            frozenset((storage.node.name, storage.part) for storage in counted),
            frozenset(node.name for node in program.nodes() if node.name not in left),
        )

    def counts(self, storage: Storage) -> bool:
        """Whether `storage`, of the captured program, is counted here or not at all."""
        name = storage.node.name
        return (name, storage.part) in self.apart or name in self.gone

    def at(self, places: Tensor) -> Tensor:
        """Bytes held at each of `places`."""
        return self.sizes[torch.searchsorted(self.starts, places, right=True) - 1]


@dataclass
class Moves:
    """The changes to lifetimes when a part of one region is recomputed.

    last: (number of a storage, place of a use of it); born, dies, size: of the copies' storages.
    """

    model: PeakModel
    again: Set[fx.Node]
    last: list[tuple[int, float]] = field(default_factory=list)
    born: list[float] = field(default_factory=list)
    dies: list[float] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # by identity of the original's storage

    def use(self, node: fx.Node, place: float) -> None:
        """The value of `node`, or the copy of it, is read at `place`."""
        for storage in self.model.storages.of_node.get(node, ()):
            copy = self.copies.get(id(storage)) if node in self.again else None
            if copy is not None:
                self.dies[copy] = max(self.dies[copy], place)
            elif id(storage) in self.model.number:
                self.last.append((self.model.number[id(storage)], place))

    def issue(self, node: fx.Node, place: float) -> None:
        """`node` is issued again at `place`."""
        for source in sources(node):
            self.use(source, place)
        dropout = dropped(node)
        mask = None if dropout is None else mask_of(dropout)
        if mask is not None:
            self.use(mask, place)
        for storage in self.model.storages.of_node.get(node, ()):
            if storage.node is node or dropout is not None:
                self.copies[id(storage)] = len(self.size)
                self.born.append(place)
                self.dies.append(place)
                self.size.append(storage.size)


class PeakModel:
    """The bytes of a program under choices for its regions."""

    def __init__(
        self, program: Program, storages: Storages, regions: Sequence[Reads], held: ShardingBytes
    ) -> None:
        self.storages = storages
        self.order = storages.place
        self.held = held
        counted = [s for s in storages.all if not held.counts(s)]
        self.number = {id(storage): index for index, storage in enumerate(counted)}
        self.born = torch.tensor([float(s.born) for s in counted], dtype=torch.float64)
        self.size = torch.tensor([s.size for s in counted], dtype=torch.int64)
        self.reach: dict[fx.Node, float] = {}  # of a view in backward, its own last use
        self.fixed = self._fixed(program, regions)

    def _numbers(self, node: fx.Node) -> list[int]:
        found = (self.number.get(id(s)) for s in self.storages.of_node.get(node, ()))
        return [number for number in found if number is not None]

    def _fixed(self, program: Program, regions: Sequence[Reads]) -> Tensor:
        """The last use of each storage by what no region changes."""
        last = [float(born) for born in self.born.tolist()]
        chosen = {
            (user, value)
            for reads in regions
            for user, values in reads.by_user.items()
            for value in values
        }
        views: set[fx.Node] = set()  # in backward, of what regions may read from copies instead
        for node in (*program.nodes(), program.output_node):
            place = float(self.order[node])
            for value in node.all_input_nodes:
                if (node, value) in chosen or value in views:
                    if value in alias_inputs(node):
                        views.add(node)
                    continue
                for number in self._numbers(value):
                    last[number] = max(last[number], place)
        for view in sorted(views, key=self.order.__getitem__, reverse=True):
            self.reach[view] = max(
                self.reach.get(user, float(self.order[user])) for user in (view, *view.users)
            )
        return torch.tensor(last, dtype=torch.float64)

    def moves(self, reads: Reads, again: Set[fx.Node]) -> Moves:
        """The changes if the nodes of `again` are issued once more in backward."""
        moves = Moves(self, again)
        issues: Mapping[fx.Node, list[fx.Node]] = dict(
            placed(reads, again.__contains__, self.order)
        )
        for user, values in reads.by_user.items():
            at = self.order[user]
            nodes = issues.get(user, [])
            for step, node in enumerate(nodes):
                moves.issue(node, at - 0.5 + 0.5 * (step + 1) / (len(nodes) + 1))
            for value in values:
                moves.use(value, self.reach.get(user, float(at)))
        return moves

    def peak(self, chosen: Sequence[Moves]) -> int:
        """The most bytes held at once, with these changes of all regions together."""
        last = [pair for moves in chosen for pair in moves.last]
        dies = self.fixed.clone()
        if last:
            numbers = torch.tensor([number for number, _ in last])
            places = torch.tensor([place for _, place in last], dtype=torch.float64)
            dies.scatter_reduce_(0, numbers, places, "amax")
        born = torch.tensor([b for moves in chosen for b in moves.born], dtype=torch.float64)
        gone = torch.tensor([d for moves in chosen for d in moves.dies], dtype=torch.float64)
        size = torch.tensor([s for moves in chosen for s in moves.size], dtype=torch.int64)
        keys = torch.cat([self.born, born, dies + _AFTER, gone + _AFTER, self.held.starts])
        change = torch.cat([self.size, size, -self.size, -size, torch.zeros_like(self.held.sizes)])
        keys, order = torch.sort(keys)
        live = torch.cumsum(change[order], 0)
        # Of equal places only the last sum is one that is held; the ones before are parts of it.
        return int((live + self.held.at(keys)).max())
