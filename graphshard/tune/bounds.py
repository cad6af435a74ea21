"""Lower bounds of the time and memory of a group of candidates, without rewriting a program.

A step takes at least the time of its compute, and at least that of moving its parameters and
gradients over the network, which slows compute down by the hardware's `contention` meanwhile.
Compute cannot begin before the parameters it reads are there, and the last gradients are reduced
after it. A step holds at least the rank's state between steps, and at
each node the activations and the parameters that the node reads. All of it is read off the captured
program after the group's recomputation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import add
from typing import Any

import torch
from torch import fx

from graphshard.cost.collective_cost import collective_seconds, group_shape
from graphshard.cost.estimate import optimizer_seconds
from graphshard.cost.memory import OPTIMIZERS, resident_bytes
from graphshard.cost.op_cost import op_cost
from graphshard.cost.streams import copy_seconds
from graphshard.errors import CaptureError, PassError, PlanError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.passes.offload_activations import ON_CUDA
from graphshard.pipeline import passes_of
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import alias_inputs, cast_dtype
from graphshard.program.pass_protocol import apply_pass
from graphshard.program.program import BACKWARD, FORWARD, ParamEntry, Program
from graphshard.program.spans import assign_units
from graphshard.program.storages import PARAMETERS, SAVED, Storages, storages_of
from graphshard.tune.extrapolate import Extrapolator
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import PLAIN, Candidate, CandidateGroup


@dataclass(frozen=True)
class Bound:
    """The least seconds and bytes of a group; `possible` says whether any candidate exists.

    by_schedule: the least seconds of the candidates with each `schedule`.
    """

    seconds: float
    bytes: int
    possible: bool = True
    by_schedule: Mapping[str, float] = field(default_factory=dict)

    def of_schedule(self, schedule: str) -> Bound:
        """The bound of the candidates with this `schedule` alone."""
        return replace(self, seconds=self.by_schedule.get(schedule, self.seconds))


@dataclass(frozen=True)
class _Reads:
    """The places between which a phase reads one parameter."""

    fqn: str
    phase: str
    first: int
    last: int


@dataclass(frozen=True)
class _StepNeeds:
    """The needs of a program after its recomputation; a place is an index of its nodes.

    seconds: of compute. bytes: peak bytes of activations. starts: by place, the seconds of compute
    before it. live: by place, bytes of activations. reads: the parameters that each phase reads.
    grads: the place at which the gradient of each trained parameter is computed. in_pieces: those
    whose gradient may be computed and reduced in pieces. saved: bytes that forward leaves for
    backward.
    """

    seconds: float
    bytes: int
    starts: tuple[float, ...]
    live: tuple[int, ...]
    reads: tuple[_Reads, ...]
    grads: Mapping[str, int]
    in_pieces: frozenset[str]
    saved: int

    def read_in(self, phase: str) -> frozenset[str]:
        """FQNs of the parameters that `phase` reads."""
        return frozenset(read.fqn for read in self.reads if read.phase == phase)


@dataclass
class Bounds:
    """The bounds of the groups of candidates that `simulator` simulates.

    With an `extrapolator`, compute and activations are extrapolated from its smaller models.
    """

    simulator: Simulator
    extrapolator: Extrapolator | None = None
    _needs: dict[Any, _StepNeeds] = field(default_factory=dict)
    _plans: dict[Any, ShardingPlan] = field(default_factory=dict)
    _ends: dict[Any, tuple[float, float]] = field(default_factory=dict)

    def of(self, group: CandidateGroup) -> Bound:
        """The bound of `group`; a group with budgets gets the bound of recomputing nothing."""
        try:
            return self._bound(group, self._group_needs(group))
        except (CaptureError, PolicyError, PlanError, PassError):
            return Bound(0.0, 0, possible=False)

    def _bound(self, group: CandidateGroup, needs: _StepNeeds) -> Bound:
        space = self.simulator.space
        candidates = space.candidates(group)
        plan = replace(self._plan(group), policy=space.policy(candidates[0]))
        hardware = self._hardware
        optimizer = optimizer_seconds(plan, hardware, space.auto.optimizer)
        states = OPTIMIZERS[space.auto.optimizer]
        resident, _ = resident_bytes(self._captured(plan), plan, states, plan.stale_after_step)
        offloads = plan.policy.offloads("activations")
        activations = 0 if offloads else needs.bytes
        compute = needs.seconds + _cast_seconds(plan, hardware, needs)
        copied = 0.0
        if offloads:
            copied = needs.saved / (hardware.host_bandwidth * hardware.efficiency["host"])
        if self.extrapolator is None:
            activations = _most_held(plan, needs, with_activations=not offloads)
        least = {}
        for schedule in {candidate.schedule for candidate in candidates}:
            busy = _network_seconds(plan, hardware, needs, plain=schedule == PLAIN)
            # Compute is slower by this share while the network is busy.
            seconds = max(compute + hardware.contention * busy, busy, copied)
            if self.extrapolator is None:
                seconds = max(seconds, self._with_ends(group, plan, needs, busy))
            step = space.auto.micro_batches * seconds + optimizer + hardware.step_overhead
            least[schedule] = step
        size = sum(resident.values()) + activations
        return Bound(min(least.values()), size, by_schedule=least)

    def _with_ends(
        self, group: CandidateGroup, plan: ShardingPlan, needs: _StepNeeds, busy: float
    ) -> float:
        """Least seconds with the network busy for `busy` seconds, at both ends without compute.

        Compute gets on at full speed, but for the seconds that the network is busy between them.
        """
        key = group.units, group.sharding, id(needs)
        contention = self._hardware.contention
        if key not in self._ends:
            alone = _exposed_ends(plan, self._hardware, needs)
            beside = alone
            if contention:
                beside = _exposed_ends(plan, self._hardware, needs, share=1 - contention)
            self._ends[key] = alone, beside
        alone, beside = self._ends[key]
        return max(alone, beside + contention * busy)

    @property
    def _hardware(self) -> Hardware:
        space = self.simulator.space
        return space.hardware.for_ranks(prod(space.mesh_shape))

    def _plan(self, group: CandidateGroup) -> ShardingPlan:
        """Return a plan with the layouts of `group`, which do not depend on recomputation."""
        key = group.units, group.sharding
        if key not in self._plans:
            self._plans[key] = self.simulator.plan(_without_recompute(group))
        return self._plans[key]

    def _captured(self, plan: ShardingPlan) -> Program:
        captures = self.simulator.captures
        return captures.of(plan) if self.extrapolator is None else captures.like(plan)

    def _group_needs(self, group: CandidateGroup) -> _StepNeeds:
        captured = self._captured(self._plan(group))
        if self.extrapolator is None:
            return self._recomputed_needs(self.simulator, group, captured)
        small, large = (
            self._recomputed_needs(
                simulator, group, simulator.captures.of(simulator.plan(_without_recompute(group)))
            )
            for simulator in (self.extrapolator.small, self.extrapolator.large)
        )
        if id(captured) not in self._needs:
            self._needs[id(captured)] = _needs_of(captured, self._hardware)
        # Casts do not change which parameters are read, and recomputation reads no fewer.
        return replace(
            self._needs[id(captured)],
            seconds=self.extrapolator.extrapolate(small.seconds, large.seconds),
            bytes=int(self.extrapolator.extrapolate(small.bytes, large.bytes)),
        )

    def _recomputed_needs(
        self, simulator: Simulator, group: CandidateGroup, captured: Program
    ) -> _StepNeeds:
        by_units = not simulator.space.blocks.classes
        key = id(captured), group.recompute, group.units if by_units else None
        if key not in self._needs:
            plan = simulator.plan(Candidate(replace(group, offload=None)))
            program = captured.copy()
            assign_units(program, plan)
            first, *following = passes_of(plan)
            apply_pass(first, program, plan, following)
            self._needs[key] = _needs_of(program, self._hardware)
        return self._needs[key]


def _without_recompute(group: CandidateGroup) -> Candidate:
    """Return a candidate with the same units and layouts, without recomputation and offload."""
    return Candidate(replace(group, recompute=None, offload=None))


def _needs_of(program: Program, hardware: Hardware) -> _StepNeeds:
    params = {param.node: param.fqn for param in program.params}
    reads: dict[tuple[str, str], tuple[int, int]] = {}
    grads = {grad for grad in program.results().grads if grad is not None}
    starts: list[float] = []
    seconds = 0.0
    storages = storages_of(program)
    place = storages.place
    for node in program.graph.nodes:
        starts.append(seconds)
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        cast = cast_dtype(node) is not None
        if isinstance(source, fx.Node) and source in params and (cast or alias_inputs(node)):
            params[node] = params[source]  # derived from the gathered parameter
            continue
        for value in node.all_input_nodes:
            if value in params:
                key = params[value], node.meta["phase"]
                reads[key] = reads.get(key, (place[node], 0))[0], place[node]
        if not (cast and node in grads):
            seconds += op_cost(node).seconds(hardware)
    starts.append(seconds)
    made = {param.fqn: place[end] for param, end in _made(program).items()}
    in_pieces = {}
    for param, end in _made(program).items():
        parts = _embedding_gradient(end)
        if parts:
            in_pieces[param.fqn] = parts
            made[param.fqn] = min(place[part] for part in parts) - 1
    live, saved = _activations(program, storages, {n for p in in_pieces.values() for n in p})
    return _StepNeeds(
        seconds,
        max(live, default=0),
        tuple(starts),
        live,
        tuple(_Reads(*key, *places) for key, places in reads.items()),
        made,
        frozenset(in_pieces),
        saved,
    )


def _made(program: Program) -> dict[ParamEntry, fx.Node]:
    """The node that computes the gradient of each trained parameter, casts aside."""
    pairs = zip(program.params, program.results().grads, strict=True)
    return {
        param: grad if cast_dtype(grad) is None else grad.args[0]
        for param, grad in pairs
        if grad is not None
    }


def _activations(
    program: Program, storages: Storages, left_out: Collection[fx.Node]
) -> tuple[tuple[int, ...], int]:
    """By place, the least bytes of activations; and the bytes of large ones saved for backward.

    A full gradient is freed once it is reduced, so it counts only where it is made. `left_out` are
    gradients that are made and reduced in pieces.
    """
    ends = _made(program).values()
    reduced = {id(storage) for end in ends for storage in storages.of_node.get(end, ())}
    reduced |= {id(s) for g in program.results().grads if g for s in storages.of_node.get(g, ())}
    change = [0] * (len(storages.place) + 1)
    saved = 0
    for storage in storages.all:
        if storage.kind != PARAMETERS and storage.node not in left_out:
            change[storage.born] += storage.size
            change[(storage.born if id(storage) in reduced else storage.dies) + 1] -= storage.size
        if storage.kind == SAVED and storage.size >= ON_CUDA:
            saved += storage.size
    return tuple(accumulate(change)), saved


def _embedding_gradient(grad: fx.Node) -> list[fx.Node]:
    """The nodes that compute the gradient of an embedding's weight; none if `grad` is another."""
    if grad.target is torch.ops.aten.embedding_dense_backward.default:
        return [grad]
    if grad.target is not torch.ops.aten.add.Tensor and cast_dtype(grad) is None:
        return []
    parts = [part for value in grad.all_input_nodes for part in _embedding_gradient(value)]
    return [grad, *parts] if parts else []


def _most_held(plan: ShardingPlan, needs: _StepNeeds, *, with_activations: bool) -> int:
    """The most bytes held at one node: activations, and gathered parameters around their reads."""
    layouts = {layout.fqn: (layout, unit) for unit in plan.units for layout in unit.layouts}
    change = [0] * (len(needs.live) + 1)
    kept: dict[str, tuple[int, int]] = {}
    for read in needs.reads:
        layout, unit = layouts.get(read.fqn, (None, None))
        if layout is None or unit is None or not layout.sharded or layout.resident:
            continue
        if unit.options.reshard is False:  # one gather for both phases
            first, last = kept.get(read.fqn, (read.first, read.last))
            kept[read.fqn] = min(first, read.first), max(last, read.last)
        else:
            change[read.first] += layout.full_bytes
            change[read.last + 1] -= layout.full_bytes
    for fqn, (first, last) in kept.items():
        change[first] += layouts[fqn][0].full_bytes
        change[last + 1] -= layouts[fqn][0].full_bytes
    gathered = accumulate(change)
    if not with_activations:
        return max(gathered, default=0)
    return max(map(add, needs.live, gathered), default=0)


def _exposed_ends(
    plan: ShardingPlan, hardware: Hardware, needs: _StepNeeds, share: float = 1.0
) -> float:
    """Least seconds of the gathers before one node, the compute from there to another, and reduces.

    The most over all pairs of nodes. Gathers before a node move all that has been read by then;
    reduces after a node all gradients that are made later. Each is one message, and counts by
    `share` of its seconds.
    """
    gathers: Counter[int] = Counter()
    reduces: dict[str, Counter[int]] = {"reduce_scatter": Counter(), "all_reduce": Counter()}
    first_of = {read.fqn: read.first for read in needs.reads if read.phase == FORWARD}
    names = {unit.fqn for unit in plan.units}
    nested = {fqn for fqn in names for other in names if other != fqn and _is_below(other, fqn)}
    for unit in plan.units:
        # The parameters of a unit without units inside are gathered and reduced together.
        whole = unit.fqn not in nested
        read = [layout for layout in unit.layouts if layout.sharded and layout.fqn in first_of]
        first = min((first_of[layout.fqn] for layout in read), default=0)
        for layout in read:
            if layout.fqn in needs.grads or not layout.resident:
                gathers[first if whole else first_of[layout.fqn]] += layout.full_bytes
        made = {x.fqn: needs.grads[x.fqn] for x in unit.layouts if x.fqn in needs.grads}
        whole = whole and needs.in_pieces.isdisjoint(made)
        for layout in unit.layouts:
            if layout.fqn in made and not layout.ignored:
                kind = "reduce_scatter" if layout.sharded else "all_reduce"
                at = max(made.values()) if whole else made[layout.fqn]
                reduces[kind][at] += layout.numel * layout.reduce_dtype.itemsize
    # By place, the latest start of compute over all places up to there, less the compute between.
    delay, gathered, delays = 0.0, 0, {}
    for place in sorted(gathers):
        gathered += gathers[place]
        seconds = share * _seconds("all_gather", gathered, ops.SHARD, plan, hardware)
        delay = max(delay, seconds - needs.starts[place])
        delays[place] = delay
    longest = delay + needs.seconds
    begin = sorted(delays)
    for kind, sizes in reduces.items():
        left = sum(sizes.values())
        group = ops.SHARD if kind == "reduce_scatter" else ops.ALL
        for place in sorted(sizes):
            behind = bisect_right(begin, place)
            delay = delays[begin[behind - 1]] if behind else 0.0
            rest = share * _seconds(kind, left, group, plan, hardware)
            longest = max(longest, delay + needs.starts[place + 1] + rest)
            left -= sizes[place]
    return longest


def _is_below(fqn: str, outer: str) -> bool:
    return not outer or fqn.startswith(f"{outer}.")


def _cast_seconds(plan: ShardingPlan, hardware: Hardware, needs: _StepNeeds) -> float:
    """Seconds of the casts of shards before their first gather, and of reduced gradients."""
    forward = needs.read_in(FORWARD)
    moved: Counter[int] = Counter()
    for layout in (layout for unit in plan.units for layout in unit.layouts):
        size = prod(layout.shard_shape)
        if layout.fqn in forward and layout.compute_dtype != layout.dtype:
            moved[size * (layout.dtype.itemsize + layout.compute_dtype.itemsize)] += 1
        if layout.fqn in needs.grads and layout.reduce_dtype != layout.grad_dtype:
            moved[size * (layout.reduce_dtype.itemsize + layout.grad_dtype.itemsize)] += 1
    return sum(count * copy_seconds(size, hardware) for size, count in moved.items())


def _seconds(op: str, size: int, group: str, plan: ShardingPlan, hardware: Hardware) -> float:
    shape = group_shape(group, plan.mesh_shape, hardware.gpus_per_node)
    return collective_seconds(op, size, shape, hardware) if size else 0.0


def _network_seconds(
    plan: ShardingPlan, hardware: Hardware, needs: _StepNeeds, *, plain: bool
) -> float:
    """Least seconds of the busiest network stream.

    plain: in FSDP's order each unit is a message in each phase, and one that is freed after forward
    is gathered again. Otherwise units are kept, and each kind of collective is one message.
    """
    forward, backward = needs.read_in(FORWARD), needs.read_in(BACKWARD)
    messages: list[tuple[str, int]] = []
    for unit in plan.units:
        moved: Counter[tuple[str, str]] = Counter()
        for layout in unit.layouts:
            trained = layout.fqn in needs.grads
            grad_bytes = layout.numel * layout.reduce_dtype.itemsize if trained else 0
            if not layout.sharded:
                moved["all_reduce", ""] += grad_bytes
                continue
            if layout.fqn in forward and (trained or not layout.resident):
                moved["all_gather", FORWARD] += layout.full_bytes
            if layout.fqn in backward and plain and unit.options.reshard is True:
                moved["all_gather", BACKWARD] += layout.full_bytes
            moved["reduce_scatter", ""] += grad_bytes
            moved["all_reduce", ""] += grad_bytes // plan.shard_size if plan.replicas > 1 else 0
        messages += [(op, size) for (op, _), size in moved.items()]
    joined: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    group = ops.REPLICATE if plan.replicas > 1 else ops.ALL
    group_of = {"all_gather": ops.SHARD, "reduce_scatter": ops.SHARD, "all_reduce": group}
    for op, size in messages:
        if plain and (op == "all_gather" or not plan.policy.all_reduce_below):
            seconds[op] += _seconds(op, size, group_of[op], plan, hardware)
        else:
            joined[op] += size
    for op, size in joined.items():
        seconds[op] += _seconds(op, size, group_of[op], plan, hardware)
    return max(seconds["all_gather"] + seconds["reduce_scatter"], seconds["all_reduce"])
