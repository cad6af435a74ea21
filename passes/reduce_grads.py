"""reduce_grads: each unit's gradients are averaged over the ranks in one reduce."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from graphshard import ops
from graphshard.errors import PassError
from graphshard.plan import ShardingPlan, Unit
from graphshard.program import BACKWARD, Program
from graphshard.rewrite import insert_reduce
from graphshard.runs import Runs, find_runs, unit_ancestry


@dataclass(frozen=True)
class ReduceGrads:
    """One reduce_scatter per unit (one all_reduce for its replicated parameters).

    It stands where the unit's last backward run ends and all its gradients are known. A parameter
    used in several runs has its gradients summed first, so it is reduced once.
    """

    name: str = field(default="reduce_grads", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: a gradient is reduced already.
        """
        results = program.results()
        for param, grad in zip(program.params, results.grads, strict=True):
            if _is_reduced(grad):
                raise PassError(
                    f"pass {self.name}: the gradient of {param.fqn!r} is reduced already; run it once"
                )
        place_of = {
            name: index for index, param in enumerate(program.params) for name in param.names
        }
        runs = find_runs(program, plan)
        nodes = list(program.graph.nodes)
        border = runs.position[program.first_backward()] - 1
        sites: list[tuple[int, int, Unit, dict[str, fx.Node]]] = []
        for unit in plan.units:
            grads = {
                name: results.grads[place_of[name]]
                for name in unit.params
                if name in place_of and results.grads[place_of[name]] is not None
            }
            if grads:
                after = max(border, _end(unit.fqn, grads, runs))
                sites.append((after, len(unit_ancestry(unit.fqn, plan)), unit, grads))
        # Of units that end together the inner ones are reduced first.
        sites.sort(key=lambda site: (site[0], -site[1]))
        tails: dict[int, fx.Node] = {}
        for after, _, unit, grads in sites:
            for target in (ops.reduce_scatter, ops.all_reduce):
                operands = {
                    name: (grad, plan.layouts[name].shard_shape)
                    for name, grad in grads.items()
                    if plan.layouts[name].sharded == (target is ops.reduce_scatter)
                }
                if not operands:
                    continue
                reduced, tails[after] = insert_reduce(
                    program,
                    target,
                    unit.fqn,
                    operands,
                    after=tails.get(after, nodes[after]),
                    phase=BACKWARD,
                )
                for name, node in reduced.items():
                    results.grads[place_of[name]] = node
        program.set_results(results)
        for param, grad in zip(program.params, results.grads, strict=True):
            if grad is not None and not _is_reduced(grad):
                raise PassError(
                    f"pass {self.name}: the gradient of {param.fqn!r} is not reduced; the plan "
                    "has no unit that manages it"
                )


def _is_reduced(grad: fx.Node | None) -> bool:
    return (
        grad is not None and ops.is_unpack(grad) and ops.collective_of(grad).target in ops.REDUCES
    )


def _end(unit: str, grads: dict[str, fx.Node], runs: Runs) -> int:
    """Where the unit's backward is over and the last of its gradients is known."""
    last_run = runs.of(unit, BACKWARD)[-1:]
    return max([runs.position[grad] for grad in grads.values()] + [run.stop for run in last_run])
