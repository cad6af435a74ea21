"""accumulate: accumulate gradients without a reduce, or reduce the accumulated ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import GRADIENT, SHARD, Collective, operands_of, params_of
from graphshard.program.edit import erase_dead, insert_node
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, Program


@dataclass(frozen=True)
class Accumulate(Pass):
    """Make the program of one of several micro-batches in a step.

    By default nothing changes: every gradient is reduced and returned. If gradients are
    accumulated, an `accumulate_grad` stands in place of each of their reduces, the nodes that
    follow the reduce are dropped, and no gradient is returned. Gradients are accumulated in the
    dtype of their reduce, so this pass stands behind `Precision`; each is added as it was computed,
    and the sum rounded, as `fully_shard` does.

    Args:
        keep: "gradient" accumulates full gradients in place of every reduce. "shard" accumulates
            the shards that the rank's shard group has averaged, in place of the reduce over
            replicas. None reduces all gradients.
        add: FQNs of parameters with an accumulated full gradient, to add before the reduce.
        add_shards: FQNs of parameters with an accumulated shard, to add before the reduce over
            replicas.
    """

    keep: str | None = None
    add: frozenset[str] = frozenset()
    add_shards: frozenset[str] = frozenset()
    establishes: ClassVar[Stage] = Stage.ACCUMULATED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if not (self.keep or self.add or self.add_shards):
            return
        first, second = _reduces(program)
        if self.keep == SHARD and not second:
            raise PassError(
                f"pass {self.name}: no gradient is all-reduced over replicas, so no shard can be "
                "accumulated for that; use no_sync() without all_reduce_only"
            )
        if self.keep != GRADIENT:
            self._add(program, first, self.add, GRADIENT)
        if self.keep is None:
            self._add(program, second, self.add_shards, SHARD)
        else:
            self._keep(program, first if self.keep == GRADIENT else second)

    def _add(
        self, program: Program, reduces: list[fx.Node], names: Collection[str], of: str
    ) -> None:
        missing = set(names)
        for reduce in reduces:
            operands, params = _operands(reduce)
            sums = [
                _insert(program, ops.add_accumulated, grad, reduce, name, of)
                if name in names
                else grad
                for grad, name in zip(operands, params, strict=True)
            ]
            reduce.args = (sums,)
            erase_dead(grad for grad in operands if grad.target is ops.cast)
            missing -= set(params)
        if missing:
            raise PassError(
                f"pass {self.name}: the accumulated {of} of {min(missing)!r} goes into no reduce "
                "of this program"
            )

    def _keep(self, program: Program, reduces: list[fx.Node]) -> None:
        results = program.results()
        place_of = {name: i for i, param in enumerate(program.params) for name in param.names}
        accumulated_bytes = 0
        for reduce in reduces:
            operands, params = _operands(reduce)
            for grad, name in zip(operands, params, strict=True):
                node = _insert(program, ops.accumulate_grad, grad, reduce, name, str(self.keep))
                accumulated_bytes += node.meta["val"].nbytes
                results.grads[place_of[name]] = None
        program.set_results(results)
        for reduce in reduces:
            operands, _ = _operands(reduce)
            _erase_with_followers(reduce)
            erase_dead(grad for grad in operands if grad.target is ops.cast)
        form = "unsharded gradients" if self.keep == GRADIENT else "shards of gradients"
        program.notes = (
            *program.notes,
            f"keeps {accumulated_bytes:,} bytes of {form} on each rank (no_sync)",
        )


def _reduces(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """The reduces of gradients that backward computes, and the reduces of their results."""
    first: list[fx.Node] = []
    second: list[fx.Node] = []
    for node in program.nodes(BACKWARD):
        if node.target in ops.REDUCES:
            of_results = all(map(ops.is_reduced, node.args[0]))  # type: ignore[arg-type]
            (second if of_results else first).append(node)
    return first, second


def _operands(reduce: fx.Node) -> tuple[list[fx.Node], tuple[str, ...]]:
    return operands_of(reduce), params_of(reduce)


def _insert(
    program: Program, target: Any, grad: fx.Node, before: fx.Node, param: str, of: str
) -> fx.Node:
    """Insert a node that takes `grad` as it was before its cast for the reduce."""
    source = grad.args[0] if grad.target is ops.cast else grad
    unit = Collective.of(before).unit
    with program.graph.inserting_before(before):
        return insert_node(
            program,
            target,
            (source,),
            {"unit": unit, "param": param, "of": of},
            name=f"{param}_{'' if target is ops.accumulate_grad else 'with_'}accumulated",
            unit=unit,
            phase=BACKWARD,
            val=grad.meta["val"],
        )


def _erase_with_followers(reduce: fx.Node) -> None:
    nodes = [reduce]
    for node in nodes:  # grows while it is walked
        for user in node.users:
            if ops.is_compute(user) or user.op == "output":
                raise PassError(
                    f"{user.name} reads a result of {reduce.name}, so its "
                    "operand cannot be accumulated instead"
                )
            if user not in nodes:
                nodes.append(user)
    for node in sorted(nodes, reverse=True):
        node.graph.erase_node(node)
