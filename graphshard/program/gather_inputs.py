"""Transfers that a gather does itself with its shards, beside compute: arrivals, and casts.

A program shows each as a node of its own. Where nothing but one gather reads the result, the rank
leaves it to the gather, which waits for the copy and casts on its own stream.
"""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.collective import Collective


def done_by_gather(node: fx.Node) -> fx.Node | None:
    """The gather that does `node`, an `arrive` or a cast of a shard, itself; None if none does.

    It does on several ranks only: on one, the shard is the parameter.
    """
    if node.target not in (ops.cast, ops.arrive) or len(node.users) != 1:
        return None
    (reader,) = node.users
    if node.target is ops.arrive:
        if node.all_input_nodes[0].target is not ops.to_device:
            return None
        if reader.target is ops.cast:
            return done_by_gather(reader)
    elif not _is_shard(node.all_input_nodes[0]):
        return None
    takes = reader.target is ops.all_gather and not Collective.of(reader).in_place
    return reader if takes else None


def _is_shard(source: fx.Node) -> bool:
    """Whether `source` is a stored shard, or one that arrives from the host for one reader."""
    if source.target is ops.arrive:
        return len(source.users) == 1 and source.all_input_nodes[0].target is ops.to_device
    return source.op == "placeholder"
