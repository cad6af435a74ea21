"""The storages that a step allocates, with the bytes and the lifetime of each.

They come from one walk over the graph. A storage is born at the node that computes it and dies with
the last node that uses it or a view of it, as the executed code drops values there. Operands of a
collective live until its wait, except a cast that an all_gather reads, which lives until that is
launched. Buffers of an all_gather live until their `release` or `free`.

Storages held between steps (shards, their gradients, accumulated gradients, buffers), inputs,
storages on the host, and temporaries inside an operator are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import getitem
from typing import TypeVar

import torch
from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import (
    COPYING_OPS,
    alias_inputs,
    derived_values,
    releases_of,
    storage_root,
    tensor_inputs,
)
from graphshard.program.collective import Collective, operands_of
from graphshard.program.cut import saved_nodes
from graphshard.program.packing import done_by_gather
from graphshard.program.program import COMPUTE, Program
from graphshard.torch_private.compat import size_hint

T = TypeVar("T", bound=Hashable)


def saved_storages(program: Program, plan: ShardingPlan) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The storages that forward computes on the device and backward reads.

    By the value that allocates one, the values of it that backward reads (itself or views), in
    order of the graph.

    Parameters, shards, values gathered from shards or derived from those, buffers, inputs, numbers,
    random states and values on the host are not included.
    """
    parameters = derived_values(program, plan)
    by_root: dict[fx.Node, list[fx.Node]] = {}
    for node in saved_nodes(program):
        if not isinstance(node.meta.get("val"), Tensor) or node in parameters:
            continue
        root = storage_root(node)
        if root.op == "placeholder" or ops.is_unpack(root) or ops.is_transfer(root):
            continue
        if root.target is ops.reshard or root.target in ops.RANDOM_STATES:
            continue
        if node.meta["val"].device.type != torch.device(program.capture_device).type:
            continue
        by_root.setdefault(root, []).append(node)
    return {root: tuple(values) for root, values in by_root.items()}


def gathered_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the buffers that an all_gather fills, padding included."""
    return _ranks(gather, program) * sum(map(node_bytes, operands_of(gather)))


def new_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes that an all_gather allocates: of those that are copied out, if it fills residents."""
    if not Collective.of(gather).in_place:
        return gathered_bytes(gather, program)
    return sum(_apart_bytes(gather, program))


def copied_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the largest value that the wait of an all_gather copies out of its buffer.

    Values not sharded along dim 0 are copied one by one, and the buffer of each is freed at once.
    """
    if Collective.of(gather).in_place:
        return 0
    return max(_apart_bytes(gather, program), default=0)


def _apart_bytes(gather: fx.Node, program: Program) -> list[int]:
    """Bytes of the buffer of each value that is not sharded along dim 0."""
    ranks = _ranks(gather, program)
    shards = zip(operands_of(gather), Collective.of(gather).dims, strict=True)
    return [node_bytes(shard) * ranks for shard, dim in shards if dim and ranks > 1]


def _ranks(gather: fx.Node, program: Program) -> int:
    return Collective.of(gather).ranks or program.shard_size


PARAMETERS = "unsharded parameters"


SAVED = "saved for backward"


RECOMPUTED = "recomputed"


FETCHED = "copied from the host"


FULL_GRADIENTS = "gradients to reduce"


RETURNED = "returned"


AT_WORK = "at work"


END = 1 << 60
"""The place of death of a storage that outlives the step."""


KINDS = (PARAMETERS, SAVED, RECOMPUTED, FETCHED, FULL_GRADIENTS, RETURNED, AT_WORK)


@dataclass
class Storage:
    """One allocation, with its bytes and its lifetime.

    node: the node that allocates it. size: bytes. kind: one of `KINDS`, which are: an unsharded
    parameter or a copy of one; computed in forward and used in backward; computed again in
    backward; copied from the host to the device; a full gradient to reduce; returned by the step;
    or none of these. part: the index among several results of `node`. pieces: bytes of the tensors,
    if they are several. in_place: nodes whose allocations are part of it, since a collective writes
    into them; `pieces` has the rest. stream: whose pool of torch's allocator it is of. name: that
    of `node`, if nothing else.

    In any order of the program's nodes it is born `late` places after `first`, by default `node`,
    and dies `over` places after the last of `ends`. Without `ends` it outlives the step. born,
    dies: these places in the order of the graph.
    """

    node: fx.Node
    size: int
    kind: str = AT_WORK
    part: int = 0
    first: fx.Node | None = None
    late: int = 0
    ends: list[fx.Node] = field(default_factory=list)
    over: int = 0
    pieces: tuple[int, ...] = ()
    in_place: tuple[fx.Node, ...] = ()
    born: int = 0
    dies: int = END
    stream: str = COMPUTE
    name: str = ""

    def __post_init__(self) -> None:
        self.first = self.first or self.node
        self.name = self.name or self.node.name

    def settle(self, place: Mapping[fx.Node, int]) -> Storage:
        """Set `born` and `dies` by the `place` of each node; returns itself."""
        assert self.first is not None
        self.born = place[self.first] + self.late
        if self.ends:
            self.dies = max([place[end] for end in self.ends]) + self.over
        return self

    @property
    def unit(self) -> str:
        """FQN of the unit whose code allocates it."""
        return str(self.node.meta.get("unit", ""))


@dataclass(frozen=True)
class Storages:
    """All storages of a program, in the order they are allocated.

    of_node: by node, the storages of its value. place: by node, its index in the graph.
    """

    all: tuple[Storage, ...]
    of_node: Mapping[fx.Node, tuple[Storage, ...]]
    place: Mapping[fx.Node, int]

    def live(self) -> list[int]:
        """By place, the bytes alive while the node there runs."""
        return live_bytes(self.all, len(self.place))

    def live_unsharded(self) -> list[int]:
        """By place, the bytes of gathered parameters that live once the node there is issued.

        Buffers live from their all_gather to their release or free, whatever reads them; the parts
        that a `reshard` keeps live to the end of the last gather that reads them. The copies that
        ranks store anyway do not count. At its wait a gather holds, for a moment, one value more
        (see `copied_bytes`).
        """
        change = [0] * (len(self.place) + 1)
        for storage in self.all:
            if storage.node.target in _UNSHARDED:
                change[storage.born] += storage.size
                change[max(storage.dies, storage.born + 1)] -= storage.size
        return list(accumulate(change[:-1]))

    def saved_by(self, key: Callable[[Storage], T]) -> Counter[T]:
        """Bytes of activations saved for backward, by the `key` of their storages."""
        saved: Counter[T] = Counter()
        for storage in self.all:
            if storage.kind == SAVED:
                saved[key(storage)] += storage.size
        return saved


_UNSHARDED = (ops.all_gather, ops.reshard, ops.wait)


def live_bytes(storages: Iterable[Storage], count: int) -> list[int]:
    """By place, the bytes of `storages` alive while the node there runs, in a graph of `count`."""
    change = [0] * (count + 1)
    for storage in storages:
        change[storage.born] += storage.size
        change[min(storage.dies + 1, count)] -= storage.size
    return list(accumulate(change[:-1]))


def live_unsharded(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Every node with the bytes of gathered parameters alive once it is issued.

    See `Storages.live_unsharded`.
    """
    storages = storages_of(program)
    live = storages.live_unsharded()
    return ((node, live[storages.place[node]]) for node in program.nodes())


def changes(storages: Iterable[Storage]) -> Iterator[tuple[int, list[Storage], list[Storage]]]:
    """Each place at which the live storages change, with those freed and those born there.

    A storage is freed at the place after its last use, and never if it outlives the step. Storages
    of 0 bytes are left out.
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
    """Bytes of the elements of `tensor`; a symbolic size counts as in the captured call."""
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= size_hint(length)
    return size


def node_bytes(node: fx.Node) -> int:
    """Bytes of the tensor that `node` returns, by `bytes_of`; 0 unless it returns one tensor."""
    val = node.meta.get("val")
    return bytes_of(val) if isinstance(val, Tensor) else 0


def storages_of(program: Program) -> Storages:
    """The storages of `program`, which may be captured or rewritten."""
    return _Walk(program).run()


class _Walk:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = {node: index for index, node in enumerate(program.graph.nodes)}
        self.storages: list[Storage] = []
        self.of_node: dict[fx.Node, tuple[Storage, ...]] = {}
        self.param_values = {param.node for param in program.params}

    def run(self) -> Storages:
        for node in self.program.nodes():
            self._use_inputs(node)
            self._allocate(node)
        for value in self.program.output_node.all_input_nodes:  # results live to the step's end
            for storage in self.of_node.get(value, ()):
                storage.ends = [self.program.output_node]
                if storage.kind == AT_WORK:
                    storage.kind = RETURNED
        border = self.place[self.program.first_backward()]
        for storage in self.storages:
            storage.settle(self.place)
            if storage.kind != AT_WORK:
                continue
            if storage.node.meta.get("recomputed"):
                storage.kind = RECOMPUTED
            elif self.program.grad and storage.born < border <= storage.dies:
                storage.kind = SAVED
        return Storages(tuple(self.storages), self.of_node, self.place)

    def _use_inputs(self, node: fx.Node) -> None:
        """Extend the lifetimes of the storages that `node` reads; end those that it frees."""
        if node.target in _FREES:
            freed = ops.collective_of(node) if node.target is ops.free else node.args[0]
            for storage in self.of_node.get(freed, ()):  # type: ignore[arg-type]
                if storage.ends[0].target not in _FREES:
                    storage.ends = [node]
            return
        ends = [node]
        if ops.is_collective(node) or node.target in ops.COPIES:
            ends = [user for user in node.users if user.target in (ops.wait, ops.arrive)] or ends
        for value in node.all_input_nodes:
            # A cast is copied into the gather's buffer when the gather is launched.
            copied = node.target is ops.all_gather and value.target is ops.cast
            self._use(value, [node] if copied else ends)
            if copied and value.all_input_nodes[0].target is ops.arrive and done_by_gather(value):
                self._use(value.all_input_nodes[0], ends)  # the gather itself casts the shard
            if node.target in ops.REDUCES:
                for storage in self.of_node.get(value, ()):
                    storage.kind = FULL_GRADIENTS

    def _use(self, value: fx.Node, ends: list[fx.Node]) -> None:
        for storage in self.of_node.get(value, ()):
            if storage.ends[0].target not in _FREES:
                storage.ends += ends

    def _allocate(self, node: fx.Node) -> None:
        """Find the storages of the value of `node`."""
        if node.target is ops.all_gather:
            self._allocate_gather(node)
            self.param_values.add(node)
        elif node.target is ops.reshard:
            self.of_node[node] = (self._new(node, node_bytes(node), PARAMETERS),)
        elif ops.is_transfer(node):
            self._allocate_transfer(node)
        elif ops.op_name(node) is not None or ops.is_unpack(node):
            self._share_storages(node)
            device = self.program.capture_device
            if node.target in ops.RANDOM_STATES and torch.device(device).type == "cpu":
                self.of_node[node] = (self._new(node, node_bytes(node), AT_WORK),)
        elif node.target is getitem:
            self._share_storages(node)
            source, index = node.args
            self.of_node[node] = tuple(
                storage
                for storage in self.of_node[node]
                if storage.node is not source or storage.part == index
            )
        elif alias_inputs(node):
            self._share_storages(node)
        else:
            self._allocate_compute(node)

    def _allocate_gather(self, node: fx.Node) -> None:
        """A buffer for each parameter that is released by itself, and one for all others.

        A single rank takes its shards as they are.
        """
        ranks, operands = _ranks(node, self.program), operands_of(node)
        if ranks == 1:
            self._take_operands(node, operands)
            return
        released: dict[int, Storage] = {}
        size = new_bytes(node, self.program)
        if size and Collective.of(node).in_place:
            buffers = self._new(node, size, PARAMETERS)
            buffers.ends = [user for user in node.users if user.target is ops.wait]
            size = 0
        sizes = [ranks * node_bytes(operand) for operand in operands]
        for release in releases_of(node):
            _, index = ops.released(release)
            released[index] = self._new(node, sizes[index], PARAMETERS)
            size -= sizes[index]
        rest = self._new(node, size, PARAMETERS)
        if size:
            rest.pieces = tuple(s for index, s in enumerate(sizes) if index not in released)
        self.of_node[node] = (rest, *released.values())
        for param in (user for wait in node.users for user in wait.users if ops.is_unpack(user)):
            index = param.args[1]  # type: ignore[assignment]
            self.of_node[param] = (released.get(index, rest),)

    def _take_operands(self, gather: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Let each result of a gather share the storages of its operand."""
        parts = [self.of_node.get(operand, ()) for operand in operands]
        self.of_node[gather] = tuple(storage for part in parts for storage in part)
        for param in (p for wait in gather.users for p in wait.users if ops.is_unpack(p)):
            self.of_node[param] = parts[param.args[1]]  # type: ignore[index]

    def _allocate_transfer(self, node: fx.Node) -> None:
        """A copy from the host, a cast, or a sum with an accumulated gradient.

        Transfers of reduced gradients and copies to the host allocate nothing that counts here.
        """
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target is ops.arrive:
            self._share_storages(node)
        elif node.target is ops.to_device:
            self.of_node[node] = (self._new(node, node_bytes(source), FETCHED),)
        elif done_by_gather(node) is not None and prod(self.program.mesh_shape) > 1:
            self.of_node[node] = ()  # it is cast into the gather's buffer
        elif node.target is not ops.to_host and not ops.is_reduced(source):
            is_param = ops.origin(node) in self.param_values
            kind = PARAMETERS if is_param else AT_WORK
            self.of_node[node] = (self._new(node, node_bytes(node), kind),)

    def _share_storages(self, node: fx.Node) -> None:
        """A view shares the storages of its base, a wait, selection or free those of its gather.

        Those of a reduce have none: the shard of a gradient outlives the step as `.grad`.
        """
        source = next(iter(alias_inputs(node) or node.args), None)
        if isinstance(source, fx.Node) and node.target is not ops.accumulate_grad:
            self.of_node.setdefault(node, self.of_node.get(source, ()))
            if node.target is ops.wait and source.target is ops.all_gather:
                copied = copied_bytes(source, self.program)
                if copied:
                    self._new(node, copied, PARAMETERS)
            if source in self.param_values:
                self.param_values.add(node)

    def _allocate_compute(self, node: fx.Node) -> None:
        """One storage for each tensor that `node` returns."""
        val = node.meta.get("val")
        inputs = tensor_inputs(node)
        is_param = node.target in COPYING_OPS and inputs[:1] and inputs[0] in self.param_values
        kind = PARAMETERS if is_param else AT_WORK
        if is_param:
            self.param_values.add(node)
        self.of_node[node] = tuple(
            self._new(node, bytes_of(part), kind, index)
            for index, part in enumerate(val if isinstance(val, (tuple, list)) else (val,))
            if isinstance(part, Tensor)
        )

    def _new(self, node: fx.Node, size: int, kind: str, part: int = 0) -> Storage:
        storage = Storage(node, size, kind, part, ends=[node])
        self.storages.append(storage)
        return storage


_FREES = (ops.free, ops.release)
