"""Seconds of a collective: latency per hop, and bytes over the slowest link (α-β).

See README.md for the model and its sources. Calibrated hardware replaces it by a measured line for
each collective: seconds per hop, per tensor, and per byte that passes a rank.
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
"""Suffix of the name of a line measured between nodes."""


BETWEEN, ALL_REDUCE = "network.inter", "network.all_reduce"
"""Kinds of efficiency: of rings between nodes, and of an all_reduce by the switch of a node."""


@dataclass(frozen=True)
class GroupShape:
    """The number of ranks of a collective (`size`), spread evenly over `nodes` nodes."""

    size: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on one node."""
        return max(1, self.size // self.nodes)


def group_shape(
    group: str, mesh_shape: tuple[int, ...], gpus_per_node: int, reshard: int = 0
) -> GroupShape:
    """The shape of a program's group, where neighbouring ranks share a node.

    `group` is its name in collective nodes: "shard", "replicate", "all", or "reshard" with
    `reshard` ranks. `mesh_shape` is `(ranks,)`, or `(replicas, ranks to shard over)`.
    """
    shard = mesh_shape[-1]
    world = shard * (mesh_shape[0] if len(mesh_shape) > 1 else 1)
    if group == ops.REPLICATE:
        replicas = world // shard
        on_a_node = max(1, gpus_per_node // shard)  # replicas that share a node
        return GroupShape(replicas, max(1, ceil(replicas / on_a_node)))
    size = {ops.SHARD: shard, ops.ALL: world, "reshard": reshard or shard}.get(group)
    if size is None:
        raise CostError(f"no group of ranks is called {group!r}")
    return GroupShape(size, max(1, ceil(size / gpus_per_node)))


def collective_seconds(
    op: str, moved: int, shape: GroupShape, hardware: Hardware, *, tensors: int = 1
) -> float:
    """Seconds from launch to finish of one collective with nothing else on its links.

    `op` is "all_gather", "reduce_scatter" or "all_reduce". `moved` counts the full (gathered, or
    not yet scattered) tensors. Only measured lines depend on the number of `tensors`.
    """
    n = shape.size
    if n <= 1:
        return 0.0
    line = _line(op, shape, hardware)
    if line is not None:
        fixed, tensor, byte = line
        return fixed + tensors * tensor + moved * byte
    ring = _hop_seconds(shape, hardware) + (n - 1) / n * moved / _bandwidth(shape, hardware)
    if op != "all_reduce":
        return hardware.launch_floor + ring
    in_switch = hardware.efficiency.get(ALL_REDUCE)
    if in_switch is not None and shape.nodes == 1 and n > 2:
        reduced = 2 * (n - 1) / n * moved / (hardware.intra_bandwidth * in_switch)
        return hardware.launch_floor + 2 * hardware.intra_latency + reduced
    levels = (shape.per_node - 1) * hardware.intra_latency
    levels += ceil(log2(shape.nodes)) * hardware.inter_latency
    tree = 2 * (levels + moved / _bandwidth(shape, hardware))
    return hardware.launch_floor + min(2 * ring, tree)


def saturating_bytes(shape: GroupShape, hardware: Hardware, share: float = 0.9) -> int:
    """Bytes of full tensors at which a gather spends `share` of its time moving bytes.

    The rest of its time is latency.
    """
    n = shape.size
    if n <= 1:
        return 0
    line = _line("all_gather", shape, hardware)
    if line is not None:
        return int((line[0] + line[1]) * share / (1 - share) / line[2]) if line[2] else 0
    fixed = hardware.launch_floor + _hop_seconds(shape, hardware)
    return int(fixed * share / (1 - share) * _bandwidth(shape, hardware) * n / (n - 1))


def _line(op: str, shape: GroupShape, hardware: Hardware) -> tuple[float, float, float] | None:
    """Measured seconds per call, per tensor and per byte; None if there is no measurement."""
    hops, across = shape.size - 1, shape.nodes - 1
    within = hardware.lines.get(op) if hops > across else (0.0, 0.0, 0.0)
    between = hardware.lines.get(f"{op}{BETWEEN_NODES}") if across else (0.0, 0.0, 0.0)
    if within is None or between is None:
        return None
    fixed = (hops - across) * within[0] + across * between[0]
    slowest = max(within[2], between[2] / shape.per_node)
    return fixed, max(within[1], between[1]), hops / shape.size * slowest


def _bandwidth(shape: GroupShape, hardware: Hardware) -> float:
    """Bytes a second over the slowest link of the ring."""
    slowest = hardware.intra_bandwidth
    if shape.nodes > 1:
        across = hardware.inter_bandwidth * shape.per_node
        slowest = across if shape.per_node == 1 else min(slowest, across)
    if shape.nodes > 1 and BETWEEN in hardware.efficiency:
        return slowest * hardware.efficiency[BETWEEN]
    return slowest * hardware.efficiency["network"]


def _hop_seconds(shape: GroupShape, hardware: Hardware) -> float:
    """Latency of all hops of the ring, in seconds."""
    across = shape.nodes - 1
    within = shape.size - 1 - across
    return within * hardware.intra_latency + across * hardware.inter_latency


def ranks_of(collective: fx.Node, program: Program) -> int:
    """The number of ranks that take part in `collective`."""
    return shape_of(collective, program, gpus_per_node=1 << 30).size


def shape_of(collective: fx.Node, program: Program, gpus_per_node: int) -> GroupShape:
    """The number of ranks and nodes that take part in `collective`."""
    arguments = Collective.of(collective)
    group = arguments.named_group or (ops.ALL if collective.target is ops.all_reduce else ops.SHARD)
    return group_shape(group, program.mesh_shape, gpus_per_node, arguments.ranks or 0)
