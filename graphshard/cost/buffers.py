"""The memory that collectives take besides what they gather: what reduces receive and yield.

Which buffers a reduce needs depends on the backend's algorithm (see `graphshard.runtime.reduce`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import fx

from graphshard import ops, packing
from graphshard.cost.groups import ranks_of
from graphshard.program import Program
from graphshard.sizes import is_contiguous
from graphshard.step_memory import Storage, bytes_of

BUFFERS = "communication buffers"
GRADIENTS = "gradients"
KEPT = "gradients kept by no_sync"

END = 1 << 60
"""Where a storage dies that outlives the step."""


def buffers_of(program: Program, backend: str) -> Iterator[Storage]:
    """Storages of collectives and of gradients reduced or kept, in the order they are made."""
    make = _Maker({node: index for index, node in enumerate(program.graph.nodes)})
    returned = {grad for grad in program.results().grads if grad is not None}
    for node in program.nodes():
        if node.target in ops.REDUCES:
            yield from _of_reduce(node, program, backend, make, returned)
        elif node.target is ops.all_gather:
            yield from _of_gather(node, program, backend, make)
        elif node.target is ops.keep:
            yield make(node, bytes_of(node.meta["val"]), KEPT, ends=())
        elif ops.is_transfer(node):
            size = bytes_of(node.meta["val"])
            if node.target is ops.add_kept:
                # Added in place to what an earlier backward kept, which counts on as the sum.
                yield make(node, size, KEPT, first=None, ends=[node], over=-1)
            if ops.origin(node) is node or not _is_reduced(node):
                continue
            if node.target is ops.arrive or _on_host(node):
                continue
            stays = node in returned
            ends = () if stays else _uses(node)
            yield make(node, size, GRADIENTS if stays else BUFFERS, ends=ends)


@dataclass(frozen=True)
class _Maker:
    """Makes storages that live between some nodes, in the order in which those stand now."""

    place: Mapping[fx.Node, int]

    def __call__(
        self,
        node: fx.Node,
        size: int,
        kind: str,
        *,
        first: fx.Node | EllipsisType | None = ...,
        late: int = 0,
        ends: Iterable[fx.Node],
        over: int = 0,
    ) -> Storage:
        first = node if first is ... else first
        last = list(ends)
        born = (0 if first is None else self.place[first]) + late
        dies = max((self.place[end] for end in last), default=END - over) + over
        return Storage(node, size, born, dies, kind, first=first, late=late, ends=last, over=over)


def _of_gather(node: fx.Node, program: Program, backend: str, make: _Maker) -> Iterator[Storage]:
    """Small shards travel in one message: a copy of them, and what it is received in."""
    ranks = ranks_of(node, program)
    shards = [operand.meta["val"] for operand in node.args[0]]  # type: ignore[union-attr]
    moved = sum(_packed(shards, [bytes_of(s) for s in shards], packing.GATHER_BELOW[backend]))
    if moved and ranks > 1:
        wait = next(user for user in node.users if user.target is ops.wait)
        yield make(node, moved * (1 + ranks), BUFFERS, ends=[wait])


def _of_reduce(
    node: fx.Node, program: Program, backend: str, make: _Maker, returned: set[fx.Node]
) -> Iterator[Storage]:
    wait = next(user for user in node.users if user.target is ops.wait)
    results = wait.meta["val"]
    ranks = ranks_of(node, program)
    scattered = node.target is ops.reduce_scatter and ranks > 1
    exchanged = scattered and backend == "gloo" and ranks > 2
    given = sum(map(bytes_of, results))
    first, late = node, 0
    if scattered:
        copied, longer = _sent(node, [bytes_of(r) * ranks for r in results], backend)
        if copied:  # what it was copied from is gone once the reduce is launched
            yield make(node, copied, BUFFERS, ends=[node])
        if longer:
            yield make(node, longer, BUFFERS, late=1, ends=[wait])
        if exchanged:
            yield make(node, given * ranks, BUFFERS, ends=[wait])
            first = wait
        elif backend == "gloo":
            halves = [bytes_of(r) for r in results if r.dtype is torch.float16]
            if halves:  # added up in float32
                yield make(wait, 2 * max(halves), BUFFERS, ends=[wait])
    else:
        # The copy that is reduced in place, and handed out, outlives what it was copied from.
        yield make(node, given, BUFFERS, ends=[node])
        first, late = wait, 1
    unpacked = [user for user in wait.users if ops.is_unpack(user)]
    stays = any(user in returned for user in unpacked)
    ends = [] if stays else [end for user in unpacked for end in _uses(user)] or [wait]
    kind = GRADIENTS if stays else BUFFERS
    yield make(node, given, kind, first=first, late=late, ends=ends)


def _sent(node: fx.Node, whole: list[int], backend: str) -> tuple[int, int]:
    """Bytes of the copies that are made of the operands of a reduce_scatter, and of how much more
    is sent than they hold; `whole` is what is sent of each.

    Gradients are padded, put into the order of the ranks, and packed into one message if small.
    """
    operands = [operand.meta["val"] for operand in node.args[0]]  # type: ignore[union-attr]
    dims: Any = node.kwargs.get("dims") or (0,) * len(operands)
    copied = longer = 0
    for operand, dim, size in zip(operands, dims, whole, strict=True):
        if dim or size != bytes_of(operand) or not is_contiguous(operand):
            copied += size
            longer += size - bytes_of(operand)
    packed = _packed(operands, whole, packing.REDUCE_BELOW[backend])
    divided = [
        size
        for operand, size in zip(operands, whole, strict=True)
        if operand.dtype is torch.float16 and backend != "gloo"
    ]
    return copied + sum(packed) + sum(divided), longer


def _packed(tensors: list[torch.Tensor], sizes: list[int], below: int) -> list[int]:
    """Of the bytes `sizes` of some tensors, those that travel in a message with others."""
    messages = packing.packed(sizes, [tensor.dtype for tensor in tensors], below)
    return [sizes[i] for indices in messages for i in indices]


def _is_reduced(node: fx.Node) -> bool:
    origin = ops.origin(node)
    return ops.is_unpack(origin) and ops.collective_of(origin).target in ops.REDUCES


def _on_host(node: fx.Node) -> bool:
    """Whether `node`, or what it was made from, was copied to the host."""
    while ops.is_transfer(node):
        if node.target is ops.to_host:
            return True
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return False


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it is needed for: by a collective that reads it, up to its wait."""
    yield node
    for user in node.users:
        if user.op == "call_function":
            yield user
            yield from (other for other in user.users if other.target in (ops.wait, ops.arrive))
