"""How many bytes of unsharded parameters are alive at each point of a program."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import fx

from graphshard import ops
from graphshard.program import Program


def gathered_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the buffers an all_gather fills, padding included."""
    parts: list[fx.Node] = gather.args[0]  # type: ignore[assignment]
    ranks: int = gather.kwargs.get("ranks", program.shard_size)  # type: ignore[assignment]
    return ranks * sum(map(_bytes, parts))


def new_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes that an all_gather allocates: none if it fills what ranks keep anyway."""
    return 0 if gather.kwargs.get("in_place") else gathered_bytes(gather, program)


def released_bytes(release: fx.Node, program: Program) -> int:
    """Bytes that a `release` gives back, padding included."""
    gather, index = ops.released(release)
    shards: list[fx.Node] = gather.args[0]  # type: ignore[assignment]
    ranks: int = gather.kwargs.get("ranks", program.shard_size)  # type: ignore[assignment]
    return ranks * _bytes(shards[index])


def copied_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the largest value that the wait of an all_gather copies out of its buffer.

    Those not split along dim 0 are copied one by one, each one's buffer going away right after.
    """
    shards: list[fx.Node] = gather.args[0]  # type: ignore[assignment]
    dims: tuple[int, ...] = gather.kwargs.get("dims", ())  # type: ignore[assignment]
    ranks: int = gather.kwargs.get("ranks", program.shard_size)  # type: ignore[assignment]
    if ranks == 1:
        return 0
    return max(
        (_bytes(shard) * ranks for shard, dim in zip(shards, dims, strict=False) if dim),
        default=0,
    )


def live_unsharded(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Every node with the bytes of gathered parameters alive once it is issued.

    Buffers live from their all_gather to their release or free, whatever reads them; the parts that
    a `reshard` keeps of them live to the end of the last gather that reads them. What ranks store
    whole anyway does not count. At its wait a gather holds, for a moment, one value more (see
    `copied_bytes`).
    """
    live = 0
    held: dict[fx.Node, int] = {}
    over = _parts_over(program)
    for node in program.nodes():
        gone: list[fx.Node] = []
        if node.target is ops.all_gather:
            held[node] = new_bytes(node, program)
            live += held[node]
        elif node.target is ops.reshard:
            held[node] = _bytes(node)
            live += held[node]
        elif node.target is ops.release:
            size = released_bytes(node, program)
            held[ops.released(node)[0]] -= size
            live -= size
        elif node.target is ops.free:
            gone = [ops.collective_of(node)]
        copied = 0
        if node.target is ops.wait and ops.collective_of(node).target is ops.all_gather:
            copied = copied_bytes(ops.collective_of(node), program)
            gone = over.get(node, [])
        for one in gone:
            live -= held.pop(one, 0)
        yield node, live + copied


def _parts_over(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """By wait, the parts that a `reshard` kept and nobody needs after it."""
    over: dict[fx.Node, list[fx.Node]] = {}
    for part in program.nodes():
        if part.target is ops.reshard and part.users:
            last = max(part.users)
            for wait in last.users:
                over.setdefault(wait, []).append(part)
    return over


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return prod(val.shape) * val.dtype.itemsize
