"""reduce_grads: average the gradients of each unit over the ranks in one reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.edit import insert_reduce
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, Program
from graphshard.program.spans import find_spans, unit_ancestry


@dataclass(frozen=True)
class ReduceGrads(Pass):
    """Reduce the gradients of each unit by one reduce_scatter.

    Gradients of replicated parameters are reduced by one all_reduce over all ranks, or, where the
    caller averages over replicas, over the ranks that shard. The reduce
    stands where the last backward span of the unit ends and all its gradients are computed. The
    gradients of a parameter used in several spans are summed first, so each is reduced once.
    Gradients of ignored parameters do not change.
    """

    establishes: ClassVar[Stage] = Stage.REDUCED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        results = program.results()
        place_of = {name: i for i, param in enumerate(program.params) for name in param.names}
        for param, grad in zip(program.params, results.grads, strict=True):
            if grad is not None and ops.is_reduced(grad):
                raise PassError(
                    f"pass {self.name}: the gradient of {param.fqn!r} is reduced already; run the "
                    "pass once"
                )
        tails: dict[fx.Node, fx.Node] = {}  # the last node inserted after each place
        for after, unit, grads in _sites(program, plan, place_of):
            for target in (ops.reduce_scatter, ops.all_reduce):
                operands = {
                    name: (grad, plan.layouts[name].shard_shape)
                    for name, grad in grads.items()
                    if plan.layouts[name].sharded == (target is ops.reduce_scatter)
                }
                if not operands:
                    continue
                group = None
                if target is ops.all_reduce and plan.has_replicas:
                    group = ops.SHARD if plan.replica_all_reduce else ops.ALL
                reduced, tails[after] = insert_reduce(
                    program,
                    plan,
                    target,
                    unit,
                    operands,
                    after=tails.get(after, after),
                    phase=BACKWARD,
                    group=group,
                )
                for name, node in reduced.items():
                    results.grads[place_of[name]] = node
        program.set_results(results)


def _sites(
    program: Program, plan: ShardingPlan, place_of: dict[str, int]
) -> list[tuple[fx.Node, str, dict[str, fx.Node]]]:
    """For each unit: the node to reduce after, the unit, and its full gradients by parameter.

    The list is in the order to reduce in; inner units come first where several end together.
    """
    grads_of_params = program.results().grads
    spans = find_spans(program, plan)
    nodes = list(program.graph.nodes)
    border = spans.position[program.first_backward()] - 1
    sites: list[tuple[int, int, str, dict[str, fx.Node]]] = []
    for unit in plan.units:
        names = [name for name in unit.params if name in place_of]
        grads = {name: grads_of_params[place_of[name]] for name in names}
        grads = {name: grad for name, grad in grads.items() if grad is not None}
        if grads:
            ends = [span.stop for span in spans.of(unit.fqn, BACKWARD)[-1:]]
            last = max(border, *ends, *(spans.position[grad] for grad in grads.values()))
            sites.append((last, -len(unit_ancestry(unit.fqn, plan)), unit.fqn, grads))
    sites.sort(key=lambda site: site[:2])
    return [(nodes[last], unit, grads) for last, _, unit, grads in sites]
