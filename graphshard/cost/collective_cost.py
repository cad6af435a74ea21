"""How long a collective takes: latency per hop and bytes over the slowest link (α-β).

Ring algorithms move (n-1)/n of the gathered bytes through every rank; a ring over several nodes has
as many parallel rings as ranks of the group on a node, each through another network card, so the
slowest link is the smaller of a device's own and the group's share of its node's network. An
all_reduce takes the faster of a ring and a double binary tree (literature: README.md of this
folder).

Small messages lose to latency: a ring of n ranks needs n-1 hops whatever it moves, which is the
knee that makes gathers of small units inefficient. Calibrated hardware has lines of its own for
each collective, as the runtime issues it: seconds per hop, per tensor, and per byte that passes a
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from torch import fx

from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.collective import Collective
from graphshard.program.program import Program

BETWEEN_NODES = ".inter"
"""Ends the name of a line that was measured between nodes."""


@dataclass(frozen=True)
class GroupShape:
    """The ranks of a collective: `size` of them on `nodes` nodes, equally many on each."""

    size: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on one node."""
        return max(1, self.size // self.nodes)


def group_shape(
    group: str, mesh_shape: tuple[int, ...], gpus_per_node: int, reshard: int = 0
) -> GroupShape:
    """Where the ranks of a program's group lie, given that neighbours share nodes.

    Args:
        group: as collective nodes name it: "shard", "replicate", "all", or "reshard".
        mesh_shape: `(ranks,)`, or `(replicas, ranks to shard over)`.
        gpus_per_node: ranks on a node.
        reshard: ranks of a partial reshard's groups.
    """
    shard = mesh_shape[-1]
    world = shard * (mesh_shape[0] if len(mesh_shape) > 1 else 1)
    if group == ops.REPLICATE:
        replicas = world // shard
        apart = max(1, gpus_per_node // shard)  # replicas that share a node
        return GroupShape(replicas, max(1, ceil(replicas / apart)))
    size = {ops.SHARD: shard, ops.ALL: world, "reshard": reshard or shard}.get(group)
    if size is None:
        raise CostError(f"no group of ranks is called {group!r}")
    return GroupShape(size, max(1, ceil(size / gpus_per_node)))


def collective_seconds(
    op: str, moved: int, shape: GroupShape, hardware: Hardware, *, tensors: int = 1
) -> float:
    """The time from launch to finish of one collective with nothing else on its links.

    Args:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        moved: bytes of the full (gathered, or not yet scattered) tensors.
        shape: its ranks.
        hardware: the machines.
        tensors: how many it moves; counts where that was measured.
    """
    n = shape.size
    if n <= 1:
        return 0.0
    line = _line(op, shape, hardware)
    if line is not None:
        fixed, tensor, byte = line
        return fixed + tensors * tensor + moved * byte
    ring = _hops(shape, hardware) + (n - 1) / n * moved / _bandwidth(shape, hardware)
    if op != "all_reduce":
        return hardware.launch_floor + ring
    tree = 2 * (_tree_latency(shape, hardware) + moved / _bandwidth(shape, hardware))
    return hardware.launch_floor + min(2 * ring, tree)


def saturating_bytes(shape: GroupShape, hardware: Hardware, share: float = 0.9) -> int:
    """Bytes a gather must move for latency to take no more than `1 - share` of its time."""
    n = shape.size
    if n <= 1:
        return 0
    line = _line("all_gather", shape, hardware)
    if line is not None:
        return int((line[0] + line[1]) * share / (1 - share) / line[2]) if line[2] else 0
    fixed = hardware.launch_floor + _hops(shape, hardware)
    return int(fixed * share / (1 - share) * _bandwidth(shape, hardware) * n / (n - 1))


def _line(op: str, shape: GroupShape, hardware: Hardware) -> tuple[float, float, float] | None:
    """Seconds for a call, each tensor and each byte moved, as measured; None if it was not."""
    within = hardware.lines.get(op)
    if within is None:
        return None
    hop, tensor, byte = within
    hops, passing = shape.size - 1, (shape.size - 1) / shape.size
    if shape.nodes == 1:
        return hops * hop, tensor, passing * byte
    between = hardware.lines.get(f"{op}{BETWEEN_NODES}")
    if between is None:
        return None
    across = shape.nodes - 1
    slowest = between[2] / shape.per_node
    if shape.per_node > 1:
        slowest = max(slowest, byte)
    fixed = (hops - across) * hop + across * between[0]
    return fixed, max(tensor, between[1]), passing * slowest


def _bandwidth(shape: GroupShape, hardware: Hardware) -> float:
    slowest = hardware.intra_bandwidth
    if shape.nodes > 1:
        across = hardware.inter_bandwidth * shape.per_node
        slowest = across if shape.per_node == 1 else min(slowest, across)
    return slowest * hardware.efficiency["network"]


def _hops(shape: GroupShape, hardware: Hardware) -> float:
    across = shape.nodes - 1
    within = shape.size - 1 - across
    return within * hardware.intra_latency + across * hardware.inter_latency


def _tree_latency(shape: GroupShape, hardware: Hardware) -> float:
    within = (shape.per_node - 1) * hardware.intra_latency
    return within + ceil(log2(shape.nodes)) * hardware.inter_latency if shape.nodes > 1 else within


def ranks_of(collective: fx.Node, program: Program) -> int:
    """The number of ranks that join `collective`."""
    return shape_of(collective, program, gpus_per_node=1 << 30).size


def shape_of(collective: fx.Node, program: Program, gpus_per_node: int) -> GroupShape:
    """The ranks of `collective` and the nodes they lie on."""
    arguments = Collective.of(collective)
    group = arguments.named_group or (ops.ALL if collective.target is ops.all_reduce else ops.SHARD)
    return group_shape(group, program.mesh_shape, gpus_per_node, arguments.ranks or 0)
