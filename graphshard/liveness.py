"""How many bytes of unsharded parameters are alive at each point of a program."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import fx

from graphshard import ops
from graphshard.program import Program


def gathered_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the buffers an all_gather fills, padding included."""
    shards: list[fx.Node] = gather.args[0]  # type: ignore[assignment]
    return sum(
        prod(shard.meta["val"].shape) * shard.meta["val"].dtype.itemsize * program.shard_size
        for shard in shards
    )


def copied_bytes(gather: fx.Node, program: Program) -> int:
    """Bytes of the largest value that the wait of an all_gather copies out of its buffer.

    Those not split along dim 0 are copied one by one, each one's buffer going away right after.
    """
    shards: list[fx.Node] = gather.args[0]  # type: ignore[assignment]
    dims: tuple[int, ...] = gather.kwargs.get("dims", ())  # type: ignore[assignment]
    if program.shard_size == 1:
        return 0
    return max(
        (
            prod(shard.meta["val"].shape) * shard.meta["val"].dtype.itemsize * program.shard_size
            for shard, dim in zip(shards, dims, strict=False)
            if dim
        ),
        default=0,
    )


def live_unsharded(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Every node with the bytes of gathered parameters alive once it is issued.

    Buffers live from their all_gather to their free, whatever reads them. At its wait a gather
    holds, for a moment, one value more (see `copied_bytes`).
    """
    live = 0
    for node in program.nodes():
        if node.target is ops.all_gather:
            live += gathered_bytes(node, program)
        elif node.target is ops.free:
            live -= gathered_bytes(ops.collective_of(node), program)
        copied = 0
        if node.target is ops.wait and ops.collective_of(node).target is ops.all_gather:
            copied = copied_bytes(ops.collective_of(node), program)
        yield node, live + copied
