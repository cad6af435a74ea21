"""accumulate: gradients are kept on the rank for later, or what was kept goes into the reduce."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective, operands_of, params_of
from graphshard.program.edit import insert_node
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, Program

GRADIENT = "gradient"


SHARD = "shard"


@dataclass(frozen=True)
class Accumulate(Pass):
    """Make the program of a micro-batch that is not the only one of its step.

    With the defaults nothing changes: every gradient is reduced and returned. A reduce whose
    operands are kept is dropped with all that follows from it, and no gradient is returned. What is
    kept has the dtype it is reduced in, so this runs after the casts were placed.

    Args:
        keep: "gradient" keeps what would be reduced first, whole gradients; "shard" what would be
            reduced over the replicas, after the reduce in the rank's own group; None keeps nothing.
        add: FQNs of parameters with a kept gradient, which is taken into the reduce.
        add_shards: the same for kept shards.
    """

    keep: str | None = None
    add: frozenset[str] = frozenset()
    add_shards: frozenset[str] = frozenset()
    establishes: ClassVar[Stage] = Stage.ACCUMULATED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: there is no such reduce, or a kept gradient has none to go into.
        """
        if not (self.keep or self.add or self.add_shards):
            return
        first, second = _reduces(program)
        if self.keep == SHARD and not second:
            raise PassError(
                f"pass {self.name}: no gradient is all-reduced over replicas, so none of its "
                "shards can be kept for that; use no_sync() without all_reduce_only"
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
            added = [
                _insert(program, ops.add_kept, grad, reduce, name, of) if name in names else grad
                for grad, name in zip(operands, params, strict=True)
            ]
            reduce.args = (added,)
            missing -= set(params)
        if missing:
            raise PassError(
                f"pass {self.name}: the kept {of} of {min(missing)!r} goes into no reduce of this "
                "program"
            )

    def _keep(self, program: Program, reduces: list[fx.Node]) -> None:
        results = program.results()
        place_of = {name: i for i, param in enumerate(program.params) for name in param.names}
        kept = 0
        for reduce in reduces:
            operands, params = _operands(reduce)
            for grad, name in zip(operands, params, strict=True):
                node = _insert(program, ops.keep, grad, reduce, name, str(self.keep))
                kept += node.meta["val"].nbytes
                results.grads[place_of[name]] = None
        program.set_results(results)
        for reduce in reduces:
            _erase_with_what_follows(self, reduce)
        what = "unsharded gradients" if self.keep == GRADIENT else "shards of gradients"
        program.notes = (*program.notes, f"keeps {kept:,} bytes of {what} on each rank (no_sync)")


def _reduces(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """Reduces of gradients as backward computes them, and of what such a reduce returned."""
    first: list[fx.Node] = []
    second: list[fx.Node] = []
    for node in program.nodes(BACKWARD):
        if node.target in ops.REDUCES:
            again = all(map(ops.is_reduced, node.args[0]))  # type: ignore[arg-type]
            (second if again else first).append(node)
    return first, second


def _operands(reduce: fx.Node) -> tuple[list[fx.Node], tuple[str, ...]]:
    return operands_of(reduce), params_of(reduce)


def _insert(
    program: Program, target: Any, grad: fx.Node, before: fx.Node, param: str, of: str
) -> fx.Node:
    unit = Collective.of(before).unit
    with program.graph.inserting_before(before):
        return insert_node(
            program,
            target,
            (grad,),
            {"unit": unit, "param": param, "of": of},
            name=f"{param}_{'kept' if target is ops.keep else 'with_kept'}",
            unit=unit,
            phase=BACKWARD,
            val=grad.meta["val"],
        )


def _erase_with_what_follows(owner: Accumulate, reduce: fx.Node) -> None:
    found = [reduce]
    for node in found:  # grows while it is walked
        for user in node.users:
            if ops.is_compute(user) or user.op == "output":
                raise PassError(
                    f"pass {owner.name}: {user.name} reads what {reduce.name} reduces, so it "
                    "cannot be kept instead"
                )
            if user not in found:
                found.append(user)
    for node in sorted(found, reverse=True):
        node.graph.erase_node(node)
