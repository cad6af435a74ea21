"""zero_missing_grads: insert zero gradients, to which accumulated ones are added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.edit import fake_like, insert_node
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, ParamEntry, Program

_zeros = torch.ops.aten.zeros.default


@dataclass(frozen=True)
class ZeroMissingGrads(Pass):
    """Insert a zero gradient for each of `params` that has none, before gradients are reduced.

    So this program reduces a gradient that earlier micro-batches accumulated, even if its own
    micro-batch does not use the parameter. The zeros stand where the parameter's unit ends.

    Args:
        params: FQNs of the parameters with an accumulated gradient.
        every: do so for every trained parameter, since another rank may have a gradient of it.
    """

    params: frozenset[str] = frozenset()
    every: bool = False

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        unknown = self.params - {param.fqn for param in program.params}
        if unknown or (self.params and not program.grad):
            raise PassError(
                f"pass {self.name}: the program has no parameter {min(unknown, default='')!r}, or "
                "no backward"
            )
        trained = {param.fqn for param in program.params if param.requires_grad}
        params = trained if self.every and program.grad else self.params
        if not params:
            return
        results = program.results()
        last: dict[str, fx.Node] = {node.meta["unit"]: node for node in program.nodes(BACKWARD)}
        end = program.output_node.prev
        for index, param in enumerate(program.params):
            if param.fqn in params and not param.ignored and results.grads[index] is None:
                unit = plan.unit_of_param(param.fqn)
                results.grads[index] = _insert(program, param, unit, last.get(unit, end))
        program.set_results(results)


def _insert(program: Program, param: ParamEntry, unit: str, after: fx.Node) -> fx.Node:
    val = fake_like(param.node.meta["val"], param.shape)
    with program.graph.inserting_after(after):
        return insert_node(
            program,
            _zeros,
            (list(param.shape),),
            {"dtype": val.dtype, "device": val.device},
            name=f"{param.fqn}_zeros",
            unit=unit,
            phase=BACKWARD,
            val=val,
        )
