"""What no candidate of a group can do better than, known without rewriting a program for it.

A step takes at least the time of its compute, and at least that of what its parameters and
gradients move over the network. It needs at least what a rank holds between steps, and with that
the activations that live at the worst point. Both are read off the captured program, in which
nothing is gathered yet, after the recomputation the group asks for.
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
from graphshard.tune.shallow import Shallow
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import Candidate, Group


@dataclass(frozen=True)
class Bound:
    """The least seconds and bytes of a group; `possible`, whether there is any candidate in it."""

    seconds: float
    bytes: int
    possible: bool = True


@dataclass(frozen=True)
class _Work:
    """Of a program with its recomputation: seconds of compute, bytes of activations at the worst
    point, and which parameters forward and backward read.
    """

    seconds: float
    bytes: int
    forward: frozenset[str]
    backward: frozenset[str]
    trained: frozenset[str]


@dataclass
class Bounds:
    """The bounds of the groups that `simulator` simulates.

    With smaller models, the compute and the activations are drawn out of theirs (see `Shallow`).
    """

    simulator: Simulator
    shallow: Shallow | None = None
    _works: dict[Any, _Work] = field(default_factory=dict)
    _plans: dict[Any, ShardingPlan] = field(default_factory=dict)

    def of(self, group: Group) -> Bound:
        """The bound of `group`; of one with budgets, that of recomputing nothing in no memory."""
        space = self.simulator.space
        candidates = space.candidates(group)
        try:
            plan = replace(self._plan(group), policy=space.policy(candidates[0]))
            work = self._work(group)
        except (CaptureError, PolicyError, PlanError, PassError):
            return Bound(0.0, 0, possible=False)
        hardware = space.hardware
        optimizer = optimizer_seconds(plan, hardware, space.auto.optimizer)
        keeps = any(candidate.schedule != "fsdp" for candidate in candidates)
        network = _network_seconds(plan, hardware, work, again=not keeps)
        states = OPTIMIZERS[space.auto.optimizer]
        held, _ = resident_bytes(self._captured(plan), plan, states)
        saves = plan.policy.offloads("activations")
        least = sum(held.values()) + (0 if saves else work.bytes)
        return Bound(max(work.seconds, network) + optimizer, least)

    def _plan(self, group: Group) -> ShardingPlan:
        """A plan with the layouts of `group`, which do not depend on what is recomputed."""
        key = group.units, group.sharding
        if key not in self._plans:
            self._plans[key] = self.simulator.plan(_plain(group))
        return self._plans[key]

    def _captured(self, plan: ShardingPlan) -> Program:
        captures = self.simulator.captures
        return captures.of(plan) if self.shallow is None else captures.like(plan)

    def _work(self, group: Group) -> _Work:
        captured = self._captured(self._plan(group))
        if self.shallow is None:
            return self._done(self.simulator, group, captured)
        parts = [
            self._done(model, group, model.captures.of(model.plan(_plain(group))))
            for model in (self.shallow.few, self.shallow.more)
        ]
        if id(captured) not in self._works:
            self._works[id(captured)] = _work_of(captured, self.simulator.space.hardware)
        # Casts change nothing about what reads which parameter, and recomputing reads no less.
        return replace(
            self._works[id(captured)],
            seconds=self.shallow.along(*(work.seconds for work in parts)),
            bytes=int(self.shallow.along(*(work.bytes for work in parts))),
        )

    def _done(self, model: Simulator, group: Group, captured: Program) -> _Work:
        by_units = not model.space.blocks.classes
        key = id(captured), group.recompute, group.units if by_units else None
        if key not in self._works:
            plan = model.plan(Candidate(replace(group, offload=None)))
            program = captured.copy()
            assign_units(program, plan)
            first, *following = default_passes(plan.policy)
            apply_pass(first, program, plan, following)
            self._works[key] = _work_of(program, model.space.hardware)
        return self._works[key]


def _plain(group: Group) -> Candidate:
    """A candidate with the units and layouts of `group`, which depend on nothing else of it."""
    return Candidate(replace(group, recompute=None, offload=None))


def _work_of(program: Program, hardware: Hardware) -> _Work:
    params = {param.node: param.fqn for param in program.params}
    reads: dict[str, set[str]] = {}
    grads = {grad for grad in program.results().grads if grad is not None}
    ends = {node.args[0] for node in grads if cast_dtype(node) is not None} | grads
    seconds = 0.0
    for node in program.nodes():
        source = node.args[0] if node.args else None
        cast = cast_dtype(node) is not None
        if isinstance(source, fx.Node) and source in params and (cast or alias_inputs(node)):
            params[node] = params[source]  # made of what is gathered
            continue
        for value in node.all_input_nodes:
            if value in params:
                reads.setdefault(node.meta["phase"], set()).add(params[value])
        if not (cast and node in grads):
            seconds += op_cost(node).seconds(hardware)
    storages = storages_of(program)
    # A full gradient goes once it is reduced; where it stands, it is there.
    gone = {id(storage) for end in ends for storage in storages.of_node.get(end, ())}
    change = [0] * (len(storages.place) + 1)
    for storage in storages.all:
        if storage.kind != PARAMETERS:
            change[storage.born] += storage.size
            change[(storage.born if id(storage) in gone else storage.dies) + 1] -= storage.size
    most = max(accumulate(change), default=0)
    results = zip(program.params, program.results().grads, strict=True)
    return _Work(
        seconds,
        most,
        frozenset(reads.get(FORWARD, ())),
        frozenset(reads.get(BACKWARD, ())),
        frozenset(param.fqn for param, grad in results if grad is not None),
    )


def _network_seconds(plan: ShardingPlan, hardware: Hardware, work: _Work, *, again: bool) -> float:
    """What the busiest network stream carries at least, each kind of collective as one message.

    again: units freed after forward are gathered again for certain.
    """
    gathered = scattered = reduced = 0
    for unit in plan.units:
        freed = again and unit.options.reshard is True
        for layout in unit.layouts:
            trained = layout.fqn in work.trained
            whole = layout.numel * layout.reduce_dtype.itemsize if trained else 0
            if not layout.sharded:
                reduced += whole
                continue
            if layout.fqn in work.forward and (trained or not layout.resident):
                gathered += layout.full_bytes
            if layout.fqn in work.backward and freed:
                gathered += layout.full_bytes
            scattered += whole
            reduced += whole // plan.shard_size if plan.replicas > 1 else 0

    def seconds(op: str, moved: int, group: str) -> float:
        shape = group_shape(group, plan.mesh_shape, hardware.gpus_per_node)
        return collective_seconds(op, moved, shape, hardware) if moved else 0.0

    apart = seconds("all_reduce", reduced, ops.REPLICATE if plan.replicas > 1 else ops.ALL)
    shards = seconds("all_gather", gathered, ops.SHARD)
    return max(shards + seconds("reduce_scatter", scattered, ops.SHARD), apart)
