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


def live_unsharded(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Every node with the bytes of gathered parameters alive once it is issued.

    Buffers live from their all_gather to their free, whatever reads them.
    """
    live = 0
    for node in program.nodes():
        if node.target is ops.all_gather:
            live += gathered_bytes(node, program)
        elif node.target is ops.free:
            live -= gathered_bytes(ops.collective_of(node), program)
        yield node, live
