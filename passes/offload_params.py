"""offload_params: keep parameters, gradients and the optimizer's work on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.edit import fake_on, insert_copy, note_copies
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, FORWARD, ParamEntry, Program
from graphshard.program.spans import find_spans

COPIED = "parameters and gradients"
"""The start of the note on the program about copied bytes."""


@dataclass(frozen=True)
class OffloadParams(Pass):
    """Copy each shard to the device before its gather, and each reduced gradient to the host.

    A replicated parameter is copied before the step of forward that first uses it, and stays on the
    device until its last use. Gathered parameters are on the device as without offload, so the peak
    of the largest unit does not change; shards, gradients and optimizer state move to the host. The
    copy of a gradient arrives where the next unit's is sent; see `PrefetchCopies`.
    """

    establishes: ClassVar[Stage] = Stage.OFFLOADED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        for param in [param for param in program.params if not param.ignored]:
            if any(user.target is ops.to_device for user in param.node.users):
                raise PassError(
                    f"pass {self.name}: parameter {param.fqn!r} is on the host already; run the "
                    "pass once"
                )
            unit = plan.unit_of_param(param.fqn)
            if plan.layouts[param.fqn].sharded:
                for user in list(param.node.users):
                    with program.graph.inserting_before(user):
                        on_device = _insert_copy_in(program, param, unit, user.meta["phase"])
                    user.replace_input_with(param.node, on_device)
            elif param.node.users:
                _copy_whole_in(program, plan, param, unit)
            param.node.meta["val"] = fake_on(param.node.meta["val"], "cpu")
        _copy_gradients_out(program, plan)
        note_copies(program, COPIED, params=True)


def _copy_whole_in(program: Program, plan: ShardingPlan, param: ParamEntry, unit: str) -> None:
    """Copy the whole parameter to the device before the step that first uses it."""
    users = sorted(param.node.users)
    before, phase = users[0], FORWARD
    if before.op == "output":
        before = program.first_backward()
    else:
        phase = before.meta["phase"]
        spans = find_spans(program, plan)
        steps = [n for n in spans.steps(phase) if spans.position[n] <= spans.position[before]]
        before = steps[-1] if steps else before
    with program.graph.inserting_before(before):
        on_device = _insert_copy_in(program, param, unit, phase)
    for user in users:
        user.replace_input_with(param.node, on_device)


def _insert_copy_in(program: Program, param: ParamEntry, unit: str, phase: str) -> fx.Node:
    name = param.fqn
    place = {"phase": phase, "param": name, "unit": unit}
    copy = insert_copy(program, ops.to_device, param.node, name=f"{name}_to_device", **place)
    return insert_copy(program, ops.arrive, copy, name=f"{name}_on_device", **place)


def _copy_gradients_out(program: Program, plan: ShardingPlan) -> None:
    """Copy each gradient to the host after its reduce and cast."""
    results = program.results()
    for index, (param, grad) in enumerate(zip(program.params, results.grads, strict=True)):
        if grad is None or param.ignored:
            continue
        name = param.fqn
        place = {"phase": BACKWARD, "param": name, "unit": plan.unit_of_param(name)}
        with program.graph.inserting_after(grad):
            copy = insert_copy(program, ops.to_host, grad, name=f"{name}_grad_to_host", **place)
        with program.graph.inserting_after(copy):
            results.grads[index] = insert_copy(
                program, ops.arrive, copy, name=f"{name}_grad_on_host", **place
            )
    program.set_results(results)
