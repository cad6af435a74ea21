"""The timeline of a finished program, from one walk with a clock for each stream; see README.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphshard.cost.collective_cost import ranks_of
from graphshard.cost.op_cost import op_cost
from graphshard.cost.runner import OWN, Runner, fused_costs
from graphshard.cost.streams import (
    COMPUTE,
    MEMORY_BOUND,
    Clocks,
    copy_seconds,
    local_seconds,
    memory_load,
    moved_bytes,
    node_seconds,
    only_moves,
    stream_of,
)
from graphshard.hardware.hardware import Hardware
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.program import Program
from graphshard.program.storages import node_bytes


@dataclass(frozen=True)
class Span:
    """A period of work on a stream, from `start` to `end` seconds after the step began.

    name: an op, or `COMPUTE` for compute nodes of one unit and phase in a row. issued: seconds
    after which compute reached the place that issues it.
    """

    stream: str
    name: str
    unit: str
    phase: str
    issued: float
    start: float
    end: float
    place: int  # of the node in the program

    @property
    def seconds(self) -> float:
        """Its duration in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Transfer:
    """A collective or a copy between device and host.

    bytes: those of the full tensors. waited_at: seconds after which compute reached its wait.
    exposed: seconds compute waited there. behind: the span its stream was busy with when it was
    issued; None if it started at once.
    """

    span: Span
    op: str
    group: str
    ranks: int
    bytes: int
    waited_at: float
    waited_place: int  # of the waiting node in the program
    exposed: float
    behind: Span | None


@dataclass(frozen=True)
class Timeline:
    """The timeline of a program's step, in seconds.

    at: by place in the graph, when compute has passed the node. seconds: the whole step without the
    optimizer. recomputed_flops: the part of `flops` that repeats forward.
    """

    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    at: tuple[float, ...]
    seconds: float
    flops: int
    recomputed_flops: int


def timeline_of(
    program: Program,
    plan: ShardingPlan,
    hardware: Hardware,
    *,
    tf32: bool = False,
    order: Iterable[fx.Node] | None = None,
    runner: Runner = OWN,
) -> Timeline:
    """The timeline of one step of a finished program, without the optimizer's update.

    `order` is that of all nodes, if it is not the graph's.
    """
    walk = _Walk(program, plan, hardware.for_ranks(plan.world_size), tf32, runner)
    for place, node in enumerate(program.graph.nodes if order is None else order):
        walk.visit(place, node)
    walk.end_run()
    return Timeline(
        tuple(walk.spans),
        tuple(walk.transfers),
        tuple(walk.at),
        walk.clocks.end,
        walk.flops,
        walk.recomputed_flops,
    )


class _Walk:
    def __init__(
        self,
        program: Program,
        plan: ShardingPlan,
        hardware: Hardware,
        tf32: bool,
        runner: Runner,
    ) -> None:
        self.program, self.plan, self.hardware, self.tf32 = program, plan, hardware, tf32
        self.runner = runner
        self.fused = fused_costs(program, runner.leave_eager)
        self.clocks = Clocks(hardware)
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.at: list[float] = []
        self.flops = self.recomputed_flops = 0
        self._under_way: dict[fx.Node, tuple[Span, int, Span | None]] = {}
        self._run: tuple[str, str, float, int] | None = None  # unit, phase, start, place
        self._last_on: dict[str, Span] = {}

    def visit(self, place: int, node: fx.Node) -> None:
        if node.op == "call_function":
            if ops.is_collective(node):
                self._occupy_compute(place, node, local_seconds(node, self.program, self.hardware))
                self._start(place, node, moved_bytes(node, self.program))
            elif node.target is ops.wait:
                collective = ops.collective_of(node)
                self._finish(place, collective)
                if self.runner.copies_gathers and collective.target is ops.all_gather:
                    copied = 2 * moved_bytes(collective, self.program)
                    self._occupy_compute(place, node, copy_seconds(copied, self.hardware))
            elif node.target is ops.arrive:
                self._finish(place, node.args[0])
            elif node.target in ops.COPIES:
                self._start(place, node, node_bytes(node))
            elif ops.op_name(node) is None or node.target in (*MEMORY_BOUND, ops.report_finite):
                self._compute(place, node)
        self.at.append(self.clocks.now)

    # -- compute ----------------------------------------------------------------------------------

    def _compute(self, place: int, node: fx.Node) -> None:
        if ops.op_name(node) is not None:
            seconds = node_seconds(node, self.program, self.hardware)
            moves = only_moves(node)
        else:
            cost = self.fused.get(node) or op_cost(node)
            moves = cost.only_moves
            self.flops += cost.flops
            self.recomputed_flops += cost.flops if node.meta.get("recomputed") else 0
            seconds = cost.seconds(self.hardware, tf32=self.tf32)
        self._occupy_compute(place, node, seconds, moves=moves)

    def _occupy_compute(
        self, place: int, node: fx.Node, seconds: float, *, moves: bool = True
    ) -> None:
        """Run `node` on the compute stream for `seconds`, or longer under contention."""
        if not seconds:
            return
        unit, phase = node.meta.get("unit", ""), node.meta["phase"]
        if self._run is None or self._run[:2] != (unit, phase):
            self.end_run()
            self._run = (unit, phase, self.clocks.now, place)
        self.clocks.compute(seconds, only_moves=moves)

    def end_run(self) -> None:
        if self._run is None:
            return
        unit, phase, start, place = self._run
        end = self.clocks.now
        self.spans.append(Span(COMPUTE, COMPUTE, unit, phase, start, start, end, place))
        self._run = None

    # -- communication ----------------------------------------------------------------------------

    def _start(self, place: int, node: fx.Node, moved: int) -> None:
        stream, op = stream_of(node), str(ops.op_name(node))
        seconds = node_seconds(node, self.program, self.hardware)
        issued = self.clocks.now
        start = max(issued, self.clocks.ends.get(stream, 0.0))
        load = memory_load(node, seconds, self.program, self.hardware)
        end = self.clocks.launch(stream, seconds, load=load, copy=node.target in ops.COPIES)
        unit, phase = str(node.meta.get("unit", "")), node.meta["phase"]
        span = Span(stream, op, unit, phase, issued, start, end, place)
        self.spans.append(span)
        behind = self._last_on.get(stream) if start > issued else None
        self._last_on[stream] = span
        self._under_way[node] = (span, moved, behind)

    def _finish(self, place: int, node: Any) -> None:
        """Make compute wait for the collective or copy `node`."""
        under_way = self._under_way.pop(node, None)
        if under_way is None:
            return
        span, moved, behind = under_way
        now = self.clocks.now
        exposed = max(0.0, span.end - now)
        if exposed:
            self.end_run()
            self.clocks.wait(span.end)
        is_copy = ops.is_transfer(node)
        self.transfers.append(
            Transfer(
                span,
                span.name,
                "" if is_copy else ops.group_of(node),
                1 if is_copy else ranks_of(node, self.program),
                moved,
                now,
                place,
                exposed,
                behind,
            )
        )
