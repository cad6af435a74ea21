"""The peak memory of a step for each choice of recomputed values, without rewriting the program.

A region that recomputes a value adds the lifetime of a copy and ends that of the value earlier.
Gathered parameters and full gradients are measured once, on a copy of the program that all passes
have rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from graphshard.program.aliases import alias_inputs
from graphshard.program.ops import is_compute
from graphshard.program.program import FORWARD, Program
from graphshard.program.storages import (
    FULL_GRADIENTS,
    PARAMETERS,
    Storage,
    Storages,
    bytes_of,
    live_bytes,
    storages_of,
)
from graphshard.recompute.regions import Issues, Reads, dropout_of, mask_of, plan_issues
from graphshard.torch_private.random_ops import drawn_on, may_move_generators, state_bytes

_AFTER = 1e-7
"""A storage dies this long after the place of its last use.

Between two places of the captured program, communication takes the first half of the gap and
recomputed nodes the second half, further apart than this.
"""


@dataclass(frozen=True)
class ShardingBytes:
    """Bytes of unsharded parameters and full gradients by place, as a step function.

    starts: the places at which steps begin. sizes: the bytes of each step. measured: storages (node
    and part) measured on the rewritten program instead of the captured one. removed: captured nodes
    that passes removed, such as casts of full parameters, which become casts of shards.
    """

    starts: Tensor  # float64, ascending
    sizes: Tensor  # int64
    measured: frozenset[tuple[str, int]]
    removed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program, rewritten: Program, issued: str) -> ShardingBytes:
        """Measure `rewritten`: `program` with regions recomputed and after all passes.

        The places are those of `program`; `issued` is the meta key of recomputed nodes.
        """
        place = {node.name: index for index, node in enumerate(program.graph.nodes)}
        storages = storages_of(rewritten)
        counted = [s for s in storages.all if s.kind in (PARAMETERS, FULL_GRADIENTS)]
        live = live_bytes(counted, len(storages.place))
        starts, sizes = [-1.0], [0]
        between: list[int] = []
        again = 0  # the maximum while the recomputed nodes before the next captured node run
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
        remaining = {node.name for node in rewritten.graph.nodes if is_compute(node)}
        return cls(
            torch.tensor(starts, dtype=torch.float64),
            torch.tensor(sizes, dtype=torch.int64),
            frozenset((storage.node.name, storage.part) for storage in counted),
            frozenset(node.name for node in program.nodes() if node.name not in remaining),
        )

    def counts(self, storage: Storage) -> bool:
        """Whether `storage` of the captured program is measured here or removed."""
        name = storage.node.name
        return (name, storage.part) in self.measured or name in self.removed

    def at(self, places: Tensor) -> Tensor:
        """Bytes held at each of `places`."""
        return self.sizes[torch.searchsorted(self.starts, places, right=True) - 1]


@dataclass
class LifetimeChanges:
    """The changes to lifetimes if some nodes of one region are recomputed.

    model: the model that they change. again: the recomputed nodes. last: pairs of the number of a
    storage and the place of a use of it. born, dies, size: place of birth, place of death and bytes
    of the storages of copies. copies: number of the copy, by identity of the original storage.
    """

    model: PeakModel
    again: Set[fx.Node]
    last: list[tuple[int, float]] = field(default_factory=list)
    born: list[float] = field(default_factory=list)
    dies: list[float] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    next_draw: int = -1

    def use(self, node: fx.Node, place: float) -> None:
        """Record that the value of `node`, or its copy, is read at `place`."""
        for storage in self.model.storages.of_node.get(node, ()):
            copy = self.copies.get(id(storage)) if node in self.again else None
            if copy is not None:
                self.dies[copy] = max(self.dies[copy], place)
            elif id(storage) in self.model.number:
                self.last.append((self.model.number[id(storage)], place))

    def issue(self, node: fx.Node, place: float, issues: Issues) -> None:
        """Record that `node` is issued again at `place`."""
        for source in issues.sources(node):
            self.use(source, place)
        dropout = dropout_of(node)
        masked = dropout is not None and not issues.again(dropout)
        mask = mask_of(dropout) if dropout is not None and masked else None
        if mask is not None:
            self.use(mask, place)
        for storage in self.model.storages.of_node.get(node, ()):
            if storage.node is node or masked:
                self.copies[id(storage)] = self._new(place, storage.size)
        if may_move_generators(node):
            self._draw(node, place, alone=node in issues.masks_alone)

    def _draw(self, node: fx.Node, place: float, *, alone: bool) -> None:
        """Record the states of generators that `node` needs, and the zeros it may drop from."""
        if self.model.draws[node] != self.next_draw:  # or else it goes on from the last one's
            size = state_bytes(drawn_on(node)) or 0
            saved, _ = self._new(place, size), self._new(place, size)
            self.born[saved] = self.model.order[node]
        self.next_draw = self.model.draws[node] + 1
        if alone:
            self._new(place, bytes_of(node.meta["val"][0]))

    def _new(self, place: float, size: int) -> int:
        """The number of a new storage that lives at `place`."""
        self.born.append(place)
        self.dies.append(place)
        self.size.append(size)
        return len(self.size) - 1


class PeakModel:
    """The bytes of a program under choices of recomputed values for its regions.

    Args:
        program: the captured program.
        storages: of `program`.
        regions: the reads of each region that may recompute values.
        sharding: unsharded parameters and full gradients.
    """

    def __init__(
        self,
        program: Program,
        storages: Storages,
        regions: Sequence[Reads],
        sharding: ShardingBytes,
    ) -> None:
        self.storages = storages
        self.order = storages.place
        moving = filter(may_move_generators, program.nodes(FORWARD))
        self.draws = {node: index for index, node in enumerate(moving)}
        self.sharding = sharding
        counted = [s for s in storages.all if not sharding.counts(s)]
        self.number = {id(storage): index for index, storage in enumerate(counted)}
        self.born = torch.tensor([float(s.born) for s in counted], dtype=torch.float64)
        self.size = torch.tensor([s.size for s in counted], dtype=torch.int64)
        self.view_last_use: dict[fx.Node, float] = {}  # by view in backward
        self.fixed_last_use = self._fixed_last_use(program, regions)

    def _numbers(self, node: fx.Node) -> list[int]:
        numbers = (self.number.get(id(s)) for s in self.storages.of_node.get(node, ()))
        return [number for number in numbers if number is not None]

    def _fixed_last_use(self, program: Program, regions: Sequence[Reads]) -> Tensor:
        """The last use of each storage by nodes that no choice changes."""
        last = [float(born) for born in self.born.tolist()]
        reads_by_choice = {
            (user, value)
            for reads in regions
            for user, values in reads.by_user.items()
            for value in values
        }
        views: set[fx.Node] = set()  # in backward, of values that may be read from copies
        for node in (*program.nodes(), program.output_node):
            place = float(self.order[node])
            for value in node.all_input_nodes:
                if (node, value) in reads_by_choice or value in views:
                    if value in alias_inputs(node):
                        views.add(node)
                    continue
                for number in self._numbers(value):
                    last[number] = max(last[number], place)
        for view in sorted(views, key=self.order.__getitem__, reverse=True):
            self.view_last_use[view] = max(
                self.view_last_use.get(user, float(self.order[user]))
                for user in (view, *view.users)
            )
        return torch.tensor(last, dtype=torch.float64)

    def changes(self, reads: Reads, again: Set[fx.Node]) -> LifetimeChanges:
        """The changes if the nodes of `again` are recomputed for the reads of one region."""
        changes = LifetimeChanges(self, again)
        issues = plan_issues(reads, again.__contains__, self.order)
        before: Mapping[fx.Node, list[fx.Node]] = dict(issues.before)
        for user, values in reads.by_user.items():
            at = self.order[user]
            nodes = before.get(user, [])
            for step, node in enumerate(nodes):
                changes.issue(node, at - 0.5 + 0.5 * (step + 1) / (len(nodes) + 1), issues)
            for value in values:
                changes.use(value, self.view_last_use.get(user, float(at)))
        return changes

    def peak(self, regions: Sequence[LifetimeChanges]) -> int:
        """The maximum bytes held at once, with the changes of all regions."""
        last = [pair for changes in regions for pair in changes.last]
        dies = self.fixed_last_use.clone()
        if last:
            numbers = torch.tensor([number for number, _ in last])
            places = torch.tensor([place for _, place in last], dtype=torch.float64)
            dies.scatter_reduce_(0, numbers, places, "amax")
        born = torch.tensor([b for changes in regions for b in changes.born], dtype=torch.float64)
        copy_dies = torch.tensor(
            [d for changes in regions for d in changes.dies], dtype=torch.float64
        )
        size = torch.tensor([s for changes in regions for s in changes.size], dtype=torch.int64)
        keys = torch.cat([self.born, born, dies + _AFTER, copy_dies + _AFTER, self.sharding.starts])
        change = torch.cat(
            [self.size, size, -self.size, -size, torch.zeros_like(self.sharding.sizes)]
        )
        keys, order = torch.sort(keys)
        live = torch.cumsum(change[order], 0)
        # At equal places only the last sum is real; those before it never exceed the maximum.
        return int((live + self.sharding.at(keys)).max())
