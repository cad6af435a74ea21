"""The memory that collectives take besides what they gather: what reduces receive and yield.

Which buffers a reduce needs depends on the backend's algorithm (see `graphshard.runtime.reduce`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from graphshard import ops
from graphshard.cost.groups import ranks_of
from graphshard.program import Program
from graphshard.step_memory import Storage, bytes_of

BUFFERS = "communication buffers"
GRADIENTS = "gradients"

END = 1 << 60
"""Where a storage dies that outlives the step."""


def buffers_of(program: Program, backend: str) -> Iterator[Storage]:
    """Storages of reduces and of reduced gradients, in the order they are made."""
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    returned = {grad for grad in program.results().grads if grad is not None}
    for node in program.nodes():
        if node.target in ops.REDUCES:
            yield from _of_reduce(node, program, backend, place, returned)
        elif ops.is_transfer(node) and ops.origin(node) is not node and _is_reduced(node):
            if node.target is ops.arrive or _on_host(node):
                continue
            last = END if node in returned else _last_use(node, place)
            kind = GRADIENTS if node in returned else BUFFERS
            yield Storage(node, bytes_of(node.meta["val"]), place[node], last, kind)


def _of_reduce(
    node: fx.Node,
    program: Program,
    backend: str,
    place: dict[fx.Node, int],
    returned: set[fx.Node],
) -> Iterator[Storage]:
    wait = next(user for user in node.users if user.target is ops.wait)
    launched, done = place[node], place[wait]
    operands: Any = node.args[0]
    results = wait.meta["val"]
    ranks = ranks_of(node, program)
    scattered = node.target is ops.reduce_scatter and ranks > 1
    exchanged = scattered and backend == "gloo" and ranks > 2
    if scattered:
        padded = sum(
            bytes_of(result) * ranks
            for operand, result in zip(operands, results, strict=True)
            if bytes_of(result) * ranks != bytes_of(operand.meta["val"])
        )
        if padded:
            yield Storage(node, padded, launched, done, BUFFERS)
    given = sum(map(bytes_of, results))
    if exchanged:
        yield Storage(node, given * ranks, launched, done, BUFFERS)
    unpacked = [user for user in wait.users if ops.is_unpack(user)]
    kept = [user for user in unpacked if user in returned]
    last = END if kept else max((_last_use(user, place) for user in unpacked), default=done)
    born = done if exchanged else launched
    yield Storage(node, given, born, last, GRADIENTS if kept else BUFFERS)


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


def _last_use(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """The place up to which `node` is needed: a collective needs its operands until its wait."""
    last = place[node]
    for user in node.users:
        if user.op != "call_function":
            continue
        waits = [other for other in user.users if other.target in (ops.wait, ops.arrive)]
        last = max(last, place[user], *(place[other] for other in waits))
    return last
