"""Lower bounds of the time and memory of a group of candidates, without rewriting a program.

A step takes at least the time of its compute, and at least the time its parameters and gradients
need on the network. It holds at least the rank's state between steps and the peak of its
activations. Both are measured on the captured program after the group's recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from torch import fx

from graphshard.cost.collective_cost import collective_seconds, group_shape
from graphshard.cost.estimate import optimizer_seconds
from graphshard.cost.memory import OPTIMIZERS, resident_bytes
from graphshard.cost.op_cost import op_cost
from graphshard.errors import CaptureError, PassError, PlanError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.pipeline import default_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import alias_inputs, cast_dtype
from graphshard.program.pass_protocol import apply_pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import assign_units
from graphshard.program.storages import PARAMETERS, storages_of
from graphshard.tune.extrapolate import Extrapolator
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import Candidate, CandidateGroup


@dataclass(frozen=True)
class Bound:
    """The least seconds and bytes of a group; `possible` says whether any candidate exists."""

    seconds: float
    bytes: int
    possible: bool = True


@dataclass(frozen=True)
class _StepNeeds:
    """The needs of a program after its recomputation.

    seconds: of compute. bytes: peak bytes of activations. forward, backward, trained: FQNs of the
    parameters that each phase reads, and of those that get gradients.
    """

    seconds: float
    bytes: int
    forward: frozenset[str]
    backward: frozenset[str]
    trained: frozenset[str]


@dataclass
class Bounds:
    """The bounds of the groups of candidates that `simulator` simulates.

    With an `extrapolator`, compute and activations are extrapolated from its smaller models.
    """

    simulator: Simulator
    extrapolator: Extrapolator | None = None
    _needs: dict[Any, _StepNeeds] = field(default_factory=dict)
    _plans: dict[Any, ShardingPlan] = field(default_factory=dict)

    def of(self, group: CandidateGroup) -> Bound:
        """The bound of `group`; a group with budgets gets the bound of recomputing nothing."""
        space = self.simulator.space
        candidates = space.candidates(group)
        try:
            plan = replace(self._plan(group), policy=space.policy(candidates[0]))
            needs = self._group_needs(group)
        except (CaptureError, PolicyError, PlanError, PassError):
            return Bound(0.0, 0, possible=False)
        hardware = space.hardware
        optimizer = optimizer_seconds(plan, hardware, space.auto.optimizer)
        may_keep = any(candidate.schedule != "fsdp" for candidate in candidates)
        network = _network_seconds(plan, hardware, needs, regathers=not may_keep)
        states = OPTIMIZERS[space.auto.optimizer]
        resident, _ = resident_bytes(self._captured(plan), plan, states)
        activations = 0 if plan.policy.offloads("activations") else needs.bytes
        return Bound(max(needs.seconds, network) + optimizer, sum(resident.values()) + activations)

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
            self._needs[id(captured)] = _needs_of(captured, self.simulator.space.hardware)
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
            first, *following = default_passes(plan.policy)
            apply_pass(first, program, plan, following)
            self._needs[key] = _needs_of(program, simulator.space.hardware)
        return self._needs[key]


def _without_recompute(group: CandidateGroup) -> Candidate:
    """Return a candidate with the same units and layouts, without recomputation and offload."""
    return Candidate(replace(group, recompute=None, offload=None))


def _needs_of(program: Program, hardware: Hardware) -> _StepNeeds:
    params = {param.node: param.fqn for param in program.params}
    reads: dict[str, set[str]] = {}
    grads = {grad for grad in program.results().grads if grad is not None}
    ends = {node.args[0] for node in grads if cast_dtype(node) is not None} | grads
    seconds = 0.0
    for node in program.nodes():
        source = node.args[0] if node.args else None
        cast = cast_dtype(node) is not None
        if isinstance(source, fx.Node) and source in params and (cast or alias_inputs(node)):
            params[node] = params[source]  # derived from the gathered parameter
            continue
        for value in node.all_input_nodes:
            if value in params:
                reads.setdefault(node.meta["phase"], set()).add(params[value])
        if not (cast and node in grads):
            seconds += op_cost(node).seconds(hardware)
    storages = storages_of(program)
    # A full gradient is freed once it is reduced, so it counts only where it is made.
    reduced = {id(storage) for end in ends for storage in storages.of_node.get(end, ())}
    change = [0] * (len(storages.place) + 1)
    for storage in storages.all:
        if storage.kind != PARAMETERS:
            change[storage.born] += storage.size
            change[(storage.born if id(storage) in reduced else storage.dies) + 1] -= storage.size
    peak = max(accumulate(change), default=0)
    results = zip(program.params, program.results().grads, strict=True)
    return _StepNeeds(
        seconds,
        peak,
        frozenset(reads.get(FORWARD, ())),
        frozenset(reads.get(BACKWARD, ())),
        frozenset(param.fqn for param, grad in results if grad is not None),
    )


def _network_seconds(
    plan: ShardingPlan, hardware: Hardware, needs: _StepNeeds, *, regathers: bool
) -> float:
    """Least seconds of the busiest network stream, with one message per kind of collective.

    regathers: whether units freed after forward are certainly gathered again.
    """
    gathered = scattered = reduced = 0
    for unit in plan.units:
        freed = regathers and unit.options.reshard is True
        for layout in unit.layouts:
            trained = layout.fqn in needs.trained
            grad_bytes = layout.numel * layout.reduce_dtype.itemsize if trained else 0
            if not layout.sharded:
                reduced += grad_bytes
                continue
            if layout.fqn in needs.forward and (trained or not layout.resident):
                gathered += layout.full_bytes
            if layout.fqn in needs.backward and freed:
                gathered += layout.full_bytes
            scattered += grad_bytes
            reduced += grad_bytes // plan.shard_size if plan.replicas > 1 else 0

    def seconds(op: str, size: int, group: str) -> float:
        shape = group_shape(group, plan.mesh_shape, hardware.gpus_per_node)
        return collective_seconds(op, size, shape, hardware) if size else 0.0

    all_reduces = seconds("all_reduce", reduced, ops.REPLICATE if plan.replicas > 1 else ops.ALL)
    gathers = seconds("all_gather", gathered, ops.SHARD)
    return max(gathers + seconds("reduce_scatter", scattered, ops.SHARD), all_reduces)
