"""Lower bounds of the time and memory of a group of candidates, without rewriting a program.

All of it is read off the captured program after the group's recomputation; see README.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

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
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import assign_units
from graphshard.program.storages import FULL_GRADIENTS, PARAMETERS, SAVED, live_bytes, storages_of
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
class _StepNeeds:
    """The needs of a program after its recomputation.

    seconds: of compute. bytes: peak bytes of activations. reads: FQNs of the parameters that each
    phase reads. trained: those of the parameters with a gradient. saved: bytes that forward leaves
    for backward.
    """

    seconds: float
    bytes: int
    reads: Mapping[str, frozenset[str]]
    trained: frozenset[str]
    saved: int


@dataclass
class Bounds:
    """The bounds of the groups of candidates that `simulator` simulates."""

    simulator: Simulator
    _needs: dict[Any, _StepNeeds] = field(default_factory=dict)
    _plans: dict[Any, ShardingPlan] = field(default_factory=dict)

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
        resident, _ = resident_bytes(
            self.simulator.captures.of(plan), plan, states, plan.stale_after_step
        )
        offloads = plan.policy.offloads("activations")
        activations = 0 if offloads else needs.bytes
        compute = needs.seconds + _cast_seconds(plan, hardware, needs)
        copied = 0.0
        if offloads:
            copied = needs.saved / (hardware.host_bandwidth * hardware.efficiency["host"])
        least = {}
        for schedule in {candidate.schedule for candidate in candidates}:
            busy = _network_seconds(plan, hardware, needs, plain=schedule == PLAIN)
            # Compute is slower by this share while the network is busy.
            seconds = max(compute + hardware.contention * busy, busy, copied)
            step = space.auto.micro_batches * seconds + optimizer + hardware.step_overhead
            least[schedule] = step
        size = sum(resident.values()) + activations
        return Bound(min(least.values()), size, by_schedule=least)

    @property
    def _hardware(self) -> Hardware:
        space = self.simulator.space
        return space.hardware.for_ranks(prod(space.mesh_shape))

    def _plan(self, group: CandidateGroup) -> ShardingPlan:
        """Return a plan with the layouts of `group`, which do not depend on recomputation."""
        key = group.units, group.sharding
        if key not in self._plans:
            self._plans[key] = self.simulator.plan(
                Candidate(replace(group, recompute=None, offload=None))
            )
        return self._plans[key]

    def _group_needs(self, group: CandidateGroup) -> _StepNeeds:
        captured = self.simulator.captures.of(self._plan(group))
        by_units = not self.simulator.space.blocks.classes
        key = id(captured), group.recompute, group.units if by_units else None
        if key not in self._needs:
            plan = self.simulator.plan(Candidate(replace(group, offload=None)))
            program = captured.copy()
            assign_units(program, plan)
            first, *following = passes_of(plan)
            apply_pass(first, program, plan, following)
            self._needs[key] = _needs_of(program, self._hardware)
        return self._needs[key]


def _needs_of(program: Program, hardware: Hardware) -> _StepNeeds:
    params = {param.node: param.fqn for param in program.params}
    reads: dict[str, set[str]] = {FORWARD: set(), BACKWARD: set()}
    grads = {grad for grad in program.results().grads if grad is not None}
    seconds = 0.0
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        cast = cast_dtype(node) is not None
        if isinstance(source, fx.Node) and source in params and (cast or alias_inputs(node)):
            params[node] = params[source]  # derived from the gathered parameter
            continue
        reads[node.meta["phase"]].update(
            params[value] for value in node.all_input_nodes if value in params
        )
        if not (cast and node in grads):
            seconds += op_cost(node).seconds(hardware)
    pairs = zip(program.params, program.results().grads, strict=True)
    trained = frozenset(param.fqn for param, grad in pairs if grad is not None)
    read = {phase: frozenset(names) for phase, names in reads.items()}
    most, saved = _activations(program, grads)
    return _StepNeeds(seconds, most, read, trained, saved)


def _activations(program: Program, grads: Collection[fx.Node]) -> tuple[int, int]:
    """The least peak bytes of activations; and the bytes of large ones saved for backward.

    Gradients do not count: each may be reduced as soon as it is made.
    """
    storages = storages_of(program)
    made = {id(storage) for grad in grads for storage in storages.of_node.get(grad, ())}
    counted = [
        storage
        for storage in storages.all
        if storage.kind not in (PARAMETERS, FULL_GRADIENTS) and id(storage) not in made
    ]
    saved = sum(s.size for s in storages.all if s.kind == SAVED and s.size >= ON_CUDA)
    return max(live_bytes(counted, len(storages.place)), default=0), saved


def _cast_seconds(plan: ShardingPlan, hardware: Hardware, needs: _StepNeeds) -> float:
    """Seconds of the casts of shards before their first gather, and of reduced gradients."""
    forward = needs.reads[FORWARD]
    moved: Counter[int] = Counter()
    for layout in (layout for unit in plan.units for layout in unit.layouts):
        size = prod(layout.shard_shape)
        if layout.fqn in forward and layout.compute_dtype != layout.dtype:
            moved[size * (layout.dtype.itemsize + layout.compute_dtype.itemsize)] += 1
        if layout.fqn in needs.trained and layout.reduce_dtype != layout.grad_dtype:
            moved[size * (layout.reduce_dtype.itemsize + layout.grad_dtype.itemsize)] += 1
    return sum(count * copy_seconds(size, hardware) for size, count in moved.items())


def _seconds(op: str, size: int, group: str, plan: ShardingPlan, hardware: Hardware) -> float:
    shape = group_shape(group, plan.mesh_shape, hardware.gpus_per_node)
    return collective_seconds(op, size, shape, hardware) if size else 0.0


def _surely_again(sizes: Iterable[int], plan: ShardingPlan, small: int) -> list[int]:
    """The least of the gathers of these bytes, a unit each, that backward makes.

    Those with which it begins may stay gathered: one unit, or some within a message's bytes.
    """
    again, stays = sorted(sizes), 0
    if any(unit.options.may_stay for unit in plan.units):
        while again and stays < max(1, small * plan.world_size):
            stays += again.pop()
    return again


def _network_seconds(
    plan: ShardingPlan, hardware: Hardware, needs: _StepNeeds, *, plain: bool
) -> float:
    """Least seconds of the busiest network stream.

    plain: in FSDP's order each unit is a message in each phase unless it may be merged, and one
    that is freed after forward is gathered again. Otherwise units are kept. What is not a message
    of its own is one message with all others of its kind.
    """
    forward, backward = needs.reads[FORWARD], needs.reads[BACKWARD]
    small = plan.policy.bytes_merged(plan.process_group_backend)
    messages: list[tuple[str, int]] = []
    again: list[int] = []
    for unit in plan.units:
        moved: Counter[tuple[str, str]] = Counter()
        for layout in unit.layouts:
            trained = layout.fqn in needs.trained
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
        again.append(moved.pop(("all_gather", BACKWARD), 0))
        messages += [(op, size) for (op, _), size in moved.items()]
    messages += [("all_gather", size) for size in _surely_again(again, plan, small)]
    joined: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    group = ops.REPLICATE if plan.replicas > 1 else ops.ALL
    group_of = {"all_gather": ops.SHARD, "reduce_scatter": ops.SHARD, "all_reduce": group}
    for op, size in messages:
        if plain and size > small * plan.world_size:
            seconds[op] += _seconds(op, size, group_of[op], plan, hardware)
        else:
            joined[op] += size
    for op, size in joined.items():
        seconds[op] += _seconds(op, size, group_of[op], plan, hardware)
    return max(seconds["all_gather"] + seconds["reduce_scatter"], seconds["all_reduce"])
