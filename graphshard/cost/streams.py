"""Seconds of each node of a program, the stream it occupies, and clocks of the streams.

The streams are those of the runtime: compute, one per communicator (shared by the gathers and
reduces of a group of ranks), and one for each direction of copies between device and host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from graphshard.cost.collective_cost import (
    collective_seconds,
    group_shape,
    ranks_of,
    shape_of,
)
from graphshard.cost.op_cost import OpCost, op_cost
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.collective import operands_of
from graphshard.program.program import Program
from graphshard.program.storages import node_bytes

COMPUTE, FROM_HOST, TO_HOST = "compute", "copies from host", "copies to host"


MEMORY_BOUND = ops.targets(lambda op: op.streams_bytes)
"""Ops of graphshard that copy or cast one tensor on the compute stream."""


def stream_of(node: fx.Node) -> str:
    """The stream that `node` of a program occupies."""
    if ops.is_collective(node):
        return f"network ({ops.group_of(node)})"
    if node.target is ops.to_device:
        return FROM_HOST
    return TO_HOST if node.target is ops.to_host else COMPUTE


def node_seconds(node: fx.Node, program: Program, hardware: Hardware) -> float:
    """Seconds that `node` occupies its stream, with nothing beside it; 0.0 for one without work."""
    if ops.is_collective(node):
        shape = shape_of(node, program, hardware.gpus_per_node)
        op, tensors = ops.OPS[node.target], len(operands_of(node))
        moved = moved_bytes(node, program)
        return collective_seconds(op.moves, moved, shape, hardware, tensors=tensors)
    if node.target in ops.COPIES:
        bandwidth = hardware.host_bandwidth * hardware.efficiency["host"]
        return hardware.launch_floor + node_bytes(node) / bandwidth
    if node.target in MEMORY_BOUND:
        reads = [node] if node.target is ops.reshard else node.all_input_nodes  # it reads its part
        moved = sum(map(node_bytes, (node, *reads)))
        return copy_seconds(moved, hardware)
    if node.target is ops.report_finite:
        shape = group_shape(ops.ALL, program.mesh_shape, hardware.gpus_per_node)
        return collective_seconds("all_gather", 8 * shape.size, shape, hardware)
    if ops.op_name(node) is not None:
        return 0.0
    return op_cost(node).seconds(hardware)


class NodeCost(NamedTuple):
    """What a node costs on its stream.

    seconds: with nothing else under way. load: the part of the memory's bandwidth that a collective
    or copy takes meanwhile. moves: whether it is a kernel that only moves bytes.
    """

    seconds: float
    load: float = 0.0
    moves: bool = False


def node_cost(node: fx.Node, program: Program, hardware: Hardware) -> NodeCost:
    """The seconds of `node` on its stream, and what it does to those beside it."""
    seconds = node_seconds(node, program, hardware)
    if not seconds:
        return _NOTHING
    if ops.is_collective(node) or node.target in ops.COPIES:
        return NodeCost(seconds, memory_load(node, seconds, program, hardware))
    return NodeCost(seconds, moves=only_moves(node))


_NOTHING = NodeCost(0.0)


def memory_load(node: fx.Node, seconds: float, program: Program, hardware: Hardware) -> float:
    """The part of the memory's bandwidth that a collective or copy takes for its `seconds`."""
    if not seconds or not hardware.contention_bytes:
        return 0.0
    if ops.is_collective(node):
        ranks = ranks_of(node, program)
        sent = moved_bytes(node, program) * (ranks - 1) / ranks
        bytes_of_memory = sent * hardware.contention_bytes
    else:
        bytes_of_memory = node_bytes(node)
    return bytes_of_memory / seconds / hardware.memory_bandwidth


def only_moves(node: fx.Node) -> bool:
    """Whether `node` is a kernel that only reads and writes memory."""
    if node.target in MEMORY_BOUND:
        return True
    return ops.op_name(node) is None and op_cost(node).only_moves


def local_seconds(node: fx.Node, program: Program, hardware: Hardware) -> float:
    """Seconds of compute that launching `node`, a collective or a copy, takes.

    The gradients of a single rank are copied, since `.grad` must not share a storage.
    """
    if node.target not in ops.REDUCES or ranks_of(node, program) > 1:
        return 0.0
    return copy_seconds(2 * moved_bytes(node, program), hardware)


def copy_seconds(moved: int, hardware: Hardware) -> float:
    """Seconds of a copy on the device that reads and writes `moved` bytes together."""
    return OpCost("bandwidth", 0, moved, torch.float32, ("clone", "add")).seconds(hardware)


def moved_bytes(collective: fx.Node, program: Program) -> int:
    """Bytes of the full tensors that `collective` gathers, scatters or reduces."""
    size = sum(map(node_bytes, operands_of(collective)))
    return size * ranks_of(collective, program) if collective.target is ops.all_gather else size


_MOST = 0.85  # a kernel goes on, however many bytes a collective moves beside it


class Clocks:
    """The times at which compute and each other stream become free, in seconds of the step.

    Compute nodes run one after the other. A collective or a copy between device and host starts
    once its stream is free and compute has reached the place that launches it.

    Compute is slower beside them. A collective occupies multiprocessors, which costs every kernel
    the fraction `contention` of the hardware; on hosts a copy does so, too. And what it reads and
    writes of the memory's bandwidth is missing to kernels that only move bytes.

    now: when compute becomes free. ends: when each other stream becomes free, by its name.
    """

    __slots__ = ("_busy_until", "_contention", "_loads", "_on_host", "ends", "now")

    def __init__(self, hardware: Hardware) -> None:
        self._contention = hardware.contention
        self._on_host = hardware.is_host
        self.now = self._busy_until = 0.0
        self.ends: dict[str, float] = {}
        self._loads: list[tuple[float, float, float]] = []  # of memory: start, end, part of it

    @property
    def end(self) -> float:
        """Seconds after which all streams are free."""
        return max([self.now, *self.ends.values()])

    def compute(self, seconds: float, *, only_moves: bool = False) -> None:
        """Run `seconds` of compute, which take longer while other streams slow it down.

        `only_moves`: the kernel reads and writes memory and computes nothing.
        """
        if only_moves and seconds and self._loads:
            seconds = self._beside_loads(seconds)
        contended = self._busy_until - self.now
        if seconds and self._contention and contended > 0:
            speed = 1 - self._contention
            done = contended * speed  # seconds of compute that finish meanwhile
            seconds = seconds / speed if done >= seconds else contended + seconds - done
        self.now += seconds

    def _beside_loads(self, seconds: float) -> float:
        """Run `seconds` of moving bytes while memory has loads; return what is left to run."""
        self._loads = [load for load in self._loads if load[1] > self.now]
        times = sorted({time for load in self._loads for time in load[:2] if time > self.now})
        for until in times:
            taken = sum(part for start, end, part in self._loads if start <= self.now < end)
            held = self._contention if self.now < self._busy_until else 0.0
            speed = 1 - max(held, min(_MOST, held + taken))
            done = (until - self.now) * speed
            if done >= seconds:
                self.now += seconds / speed
                return 0.0
            self.now, seconds = until, seconds - done
        return seconds

    def launch(
        self, stream: str, seconds: float, *, load: float = 0.0, copy: bool = False
    ) -> float:
        """Occupy `stream` for `seconds` once it is free, and return the time it ends.

        `load` is the part of the memory's bandwidth that it takes meanwhile. A `copy` is one
        between device and host, not a collective.
        """
        start = max(self.now, self.ends.get(stream, 0.0))
        end = start + seconds
        self.ends[stream] = end
        if not copy or self._on_host:
            self._busy_until = max(self._busy_until, end)
        if load:
            self._loads.append((start, end, load))
        return end

    def wait(self, end: float) -> None:
        """Make compute wait until the time `end`."""
        self.now = max(self.now, end)
