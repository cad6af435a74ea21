"""What a step allocates: every storage of a program with its bytes and how long it lives.

One walk over the graph. A storage is born at the node that computes it and dies with the last node
that uses it, views of it included, as the executed code drops values there. What a collective reads
lives until its wait, a cast that an all_gather reads until that is launched; what an all_gather
fills lives from there to its `release` or `free`. Not counted is what a rank holds between steps
(shards, their gradients, gradients kept for later steps, buffers), the step's inputs, what lies on
the host, and what an operator allocates and drops inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import getitem

import torch
from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import (
    COPIES,
    alias_inputs,
    derived_values,
    releases_of,
    storage_root,
    tensor_inputs,
)
from graphshard.program.collective import Collective, operands_of
from graphshard.program.cut import saved_nodes
from graphshard.program.program import FORWARD, Program
from graphshard.torch_private.compat import size_hint


@dataclass(frozen=True)
class Saved:
    """A storage that forward computes and backward reads.

    root: the value that owns it. values: what backward reads of it, in order of the graph; the
    root itself, or views of it.
    """

    root: fx.Node
    values: tuple[fx.Node, ...]


def saved_storages(program: Program, plan: ShardingPlan) -> list[Saved]:
    """What forward computes on the device and backward reads, by storage.

    Not parameters, shards and what is gathered from them, kept or derived of that, not buffers and
    inputs (which live anyway), no numbers, and nothing that lies on the host.
    """
    parameters = derived_values(program, plan)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in saved_nodes(program):
        if not isinstance(node.meta.get("val"), Tensor) or node in parameters:
            continue
        root = storage_root(node)
        if root.op == "placeholder" or ops.is_unpack(root) or ops.is_transfer(root):
            continue
        if root.target is ops.reshard:
            continue
        if node.meta["val"].device.type != torch.device(program.capture_device).type:
            continue
        found.setdefault(root, []).append(node)
    return [Saved(root, tuple(values)) for root, values in found.items()]


def gathered_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the buffers an all_gather fills, padding included."""
    return _ranks(gather, program) * sum(map(node_bytes, operands_of(gather)))


def new_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes that an all_gather allocates: none if it fills what ranks keep anyway."""
    return 0 if Collective.of(gather).in_place else gathered_bytes(gather, program)


def released_bytes(release: fx.Node, program: Program) -> int:
    """Bytes that a `release` gives back, padding included."""
    gather, index = ops.released(release)
    return _ranks(gather, program) * node_bytes(operands_of(gather)[index])


def copied_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the largest value that the wait of an all_gather copies out of its buffer.

    Those not split along dim 0 are copied one by one, each one's buffer going away right after.
    """
    ranks = _ranks(gather, program)
    if ranks == 1:
        return 0
    split = zip(operands_of(gather), Collective.of(gather).dims, strict=True)
    return max((node_bytes(shard) * ranks for shard, dim in split if dim), default=0)


def _ranks(gather: fx.Node, program: Program) -> int:
    return Collective.of(gather).ranks or program.shard_size


PARAMETERS = "unsharded parameters"


SAVED = "saved for backward"


RECOMPUTED = "recomputed"


FETCHED = "copied from the host"


GRADIENTS = "gradients to reduce"


RETURNED = "returned"


AT_WORK = "at work"


END = 1 << 60
"""The place where a storage dies that outlives the step."""


KINDS = (PARAMETERS, SAVED, RECOMPUTED, FETCHED, GRADIENTS, RETURNED, AT_WORK)


@dataclass
class Storage:
    """One allocation: what made it, its bytes, and the places of the nodes it lives between.

    kind is one of `KINDS`: an unsharded parameter or a copy of one; computed in forward and used in
    backward; computed again in backward; copied to the device from the host; the full gradient of a
    parameter that is to be reduced; returned by the step; or none of these.

    In another order of the same nodes it is born where `first` stands, `late` places behind it, and
    dies with the last of `ends`, `over` places behind that: see `graphshard.schedule.memory`.
    """

    node: fx.Node
    size: int
    born: int
    dies: int  # the place of the last node that uses it
    kind: str = AT_WORK
    part: int = 0  # which of several results of its node
    first: fx.Node | None = None  # None: the beginning of the step
    late: int = 0
    ends: list[fx.Node] = field(default_factory=list)  # none: it outlives the step
    over: int = 0

    @property
    def unit(self) -> str:
        """FQN of the unit whose code made it."""
        return str(self.node.meta.get("unit", ""))


@dataclass(frozen=True)
class Storages:
    """All storages of a program, in the order they are made."""

    all: tuple[Storage, ...]
    of_node: Mapping[fx.Node, tuple[Storage, ...]]  # those its value lies in
    place: Mapping[fx.Node, int]

    def held_at(self, place: int) -> Iterator[Storage]:
        """The storages that live while the node at `place` runs."""
        return (s for s in self.all if s.born <= place <= s.dies)

    def live(self) -> list[int]:
        """By place, the bytes that live while the node there runs."""
        total = 0
        live: list[int] = []
        for place, gone, new in changes(self.all):
            live += [total] * (place - len(live))
            total += sum(storage.size for storage in new) - sum(storage.size for storage in gone)
        return live + [total] * (len(self.place) - len(live))

    def live_unsharded(self) -> list[int]:
        """By place, the bytes of gathered parameters that live once the node there is issued.

        Buffers live from their all_gather to their release or free, whatever reads them; the parts
        that a `reshard` keeps live to the end of the last gather that reads them. The copies that
        ranks store anyway do not count. At its wait a gather holds, for a moment, one value more
        (see `copied_bytes`).
        """
        end = len(self.place)
        change = [0] * (end + 1)
        for storage in self.all:
            if storage.node.target is ops.all_gather:
                freed = storage.ends[0].target in (ops.free, ops.release)
                gone = storage.dies if freed else end
            elif storage.node.target is ops.reshard:
                gone = storage.dies if len(storage.ends) > 1 else end
            elif storage.node.target is ops.wait:
                gone = storage.born + 1
            else:
                continue
            change[storage.born] += storage.size
            change[gone] -= storage.size
        return list(accumulate(change[:end]))

    def saved_by_unit(self) -> Counter[str]:
        """Bytes of activations kept from forward to backward, by the unit that computed them."""
        found: Counter[str] = Counter()
        for storage in self.all:
            if storage.kind == SAVED:
                found[storage.unit] += storage.size
        return found


def live_unsharded(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Every node with the bytes of gathered parameters alive once it is issued.

    See `Storages.live_unsharded`.
    """
    storages = storages_of(program)
    live = storages.live_unsharded()
    return ((node, live[storages.place[node]]) for node in program.nodes())


def changes(storages: Iterable[Storage]) -> Iterator[tuple[int, list[Storage], list[Storage]]]:
    """Each place at which what is alive changes, with the storages gone by then and those born.

    A storage is gone at the place behind that of its last use, and never if it outlives the step.
    Those of no bytes are left out.
    """
    by_place: dict[int, tuple[list[Storage], list[Storage]]] = {}
    for storage in storages:
        if storage.size:
            by_place.setdefault(storage.born, ([], []))[1].append(storage)
            if storage.dies < END:
                by_place.setdefault(storage.dies + 1, ([], []))[0].append(storage)
    for place in sorted(by_place):
        yield place, *by_place[place]


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; a symbolic size counts as in the call captured."""
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= size_hint(length)
    return size


def node_bytes(node: fx.Node) -> int:
    """Bytes of the tensor that `node` gives, as `bytes_of`; 0 if it gives none, or several."""
    val = node.meta.get("val")
    return bytes_of(val) if isinstance(val, Tensor) else 0


def storages_of(program: Program) -> Storages:
    """The storages of `program`, captured or rewritten."""
    return _Walk(program).run()


class _Walk:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = {node: index for index, node in enumerate(program.graph.nodes)}
        self.found: list[Storage] = []
        self.of_node: dict[fx.Node, tuple[Storage, ...]] = {}
        self.parts: dict[fx.Node, list[tuple[Storage, ...]]] = {}  # of a node with several results
        self.of_params = {param.node for param in program.params}
        self.freed: set[int] = set()

    def run(self) -> Storages:
        for node in self.program.nodes():
            self._uses(node)
            self._makes(node)
        border = self.place[self.program.first_backward()]
        self._ends()
        for storage in self.found:
            node = storage.node
            if node.meta.get("recomputed") and storage.kind == AT_WORK:
                storage.kind = RECOMPUTED
            elif (
                storage.kind == AT_WORK
                and node.meta["phase"] == FORWARD
                and storage.dies >= border
                and self.program.grad
            ):
                storage.kind = SAVED
        return Storages(tuple(self.found), self.of_node, self.place)

    def _uses(self, node: fx.Node) -> None:
        if node.target in (ops.free, ops.release):
            gone = ops.collective_of(node) if node.target is ops.free else node.args[0]
            for storage in self.of_node.get(gone, ()):  # type: ignore[arg-type]
                if id(storage) not in self.freed:
                    storage.dies = self.place[node]
                    storage.ends = [node]
                    self.freed.add(id(storage))
            return
        ends = [node]
        if ops.is_collective(node) or node.target in ops.COPIES:
            ends = [user for user in node.users if user.target in (ops.wait, ops.arrive)] or ends
        for value in node.all_input_nodes:
            # A cast is copied into the gather's buffer as that is launched.
            copied = node.target is ops.all_gather and value.target is ops.cast
            last = [node] if copied else ends
            at = max(self.place[end] for end in last)
            for storage in self.of_node.get(value, ()):
                if id(storage) not in self.freed:
                    storage.dies = max(storage.dies, at)
                    storage.ends += last
                if node.target in ops.REDUCES:
                    storage.kind = GRADIENTS

    def _makes(self, node: fx.Node) -> None:
        if node.target is ops.all_gather:
            self._gathers(node)
            self.of_params.add(node)
        elif node.target is ops.reshard:
            self.of_node[node] = (self._new(node, node_bytes(node), PARAMETERS),)
        elif ops.is_transfer(node):
            self._transfers(node)
        elif ops.op_name(node) is not None or ops.is_unpack(node):
            self._passes_on(node)
        elif node.target is getitem:
            source, index = node.args
            parts = self.parts.get(source)  # type: ignore[arg-type]
            if parts is None:
                self._passes_on(node)
            else:
                self.of_node[node] = parts[index]  # type: ignore[index]
        elif alias_inputs(node):
            base = alias_inputs(node)[0]
            self.of_node[node] = self.of_node.get(base, ())
            if base in self.of_params:
                self.of_params.add(node)
        else:
            self._computes(node)

    def _gathers(self, node: fx.Node) -> None:
        """Buffers of those parameters that are released one by one, and one for all others."""
        apart: dict[int, Storage] = {}
        size = new_bytes(node, self.program)
        for release in releases_of(node):
            _, index = ops.released(release)
            own = released_bytes(release, self.program)
            apart[index] = self._new(node, own, PARAMETERS)
            size -= own
        rest = self._new(node, size, PARAMETERS)
        self.of_node[node] = (rest, *apart.values())
        for picked in (pick for wait in node.users for pick in wait.users if ops.is_unpack(pick)):
            index = picked.args[1]  # type: ignore[assignment]
            self.of_node[picked] = (apart.get(index, rest),)

    def _transfers(self, node: fx.Node) -> None:
        """A copy from the host, a cast, a sum with what was kept; none that a shard is put into."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target is ops.arrive:
            self._passes_on(node)
        elif node.target is ops.to_device:
            size = node_bytes(source)
            self.of_node[node] = (self._new(node, size, FETCHED),)
        elif node.target is not ops.to_host and not ops.is_reduced(source):
            param = ops.origin(node) in self.of_params
            kind = PARAMETERS if param else AT_WORK
            self.of_node[node] = (self._new(node, node_bytes(node), kind),)

    def _passes_on(self, node: fx.Node) -> None:
        """A wait, an unpacking, a free: the storages of a gather, none of a reduce.

        What a reduce returns is a gradient's shard, which stays as the parameter's `.grad`.
        """
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and node.target is not ops.accumulate_grad:
            self.of_node.setdefault(node, self.of_node.get(source, ()))
            if node.target is ops.wait and source.target is ops.all_gather:
                copied = copied_bytes(source, self.program)
                if copied:
                    self._new(node, copied, PARAMETERS)
            if source in self.of_params:
                self.of_params.add(node)

    def _computes(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        inputs = tensor_inputs(node)
        of_param = node.target in COPIES and inputs[:1] and inputs[0] in self.of_params
        kind = PARAMETERS if of_param else AT_WORK
        if of_param:
            self.of_params.add(node)
        if isinstance(val, Tensor):
            self.of_node[node] = (self._new(node, bytes_of(val), kind),)
        elif isinstance(val, (tuple, list)):
            parts: list[tuple[Storage, ...]] = [
                (self._new(node, bytes_of(part), kind, index),) if isinstance(part, Tensor) else ()
                for index, part in enumerate(val)
            ]
            self.parts[node] = parts
            self.of_node[node] = tuple(storage for part in parts for storage in part)

    def _new(self, node: fx.Node, size: int, kind: str, part: int = 0) -> Storage:
        place = self.place[node]
        storage = Storage(node, size, place, place, kind, part, first=node, ends=[node])
        self.found.append(storage)
        return storage

    def _ends(self) -> None:
        results = self.program.results()
        end = self.place[self.program.output_node]
        for values in (results.outputs, results.mutations, results.input_grads, results.grads):
            for value in values:
                if not isinstance(value, fx.Node):
                    continue
                for storage in self.of_node.get(value, ()):
                    storage.dies = end
                    storage.ends = [self.program.output_node]
                    if storage.kind == AT_WORK:
                        storage.kind = RETURNED


def held_text(held: Mapping[tuple[str, str], int], shown: int = 3) -> str:
    """Who holds what: "saved for backward 640 (layers.1 384, layers.0 256), at work 96 ((root))".

    Args:
        held: bytes by kind and unit.
        shown: how many units to name of each kind, the largest first.
    """
    texts = []
    for kind in KINDS:
        of_kind = {unit: size for (k, unit), size in held.items() if k == kind and size}
        if not of_kind:
            continue
        ranked = sorted(of_kind.items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{unit or '(root)'} {size:,}" for unit, size in ranked[:shown])
        more = f" and {len(ranked) - shown} units more" if len(ranked) > shown else ""
        texts.append(f"{kind} {sum(of_kind.values()):,}: {named}{more}")
    return "; ".join(texts)
