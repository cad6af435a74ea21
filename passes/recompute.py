"""recompute: what a region computed in forward is computed again in backward, not saved."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import FORWARD, Program
from graphshard.recompute.regions import (
    NodePredicate,
    Reads,
    call_of,
    checkpoint_depth,
    checkpoints,
    is_compute_intensive,
    issue_again,
    plan_issues,
    reads_of_calls,
    reads_of_checkpoints,
    recomputable,
    saved_by_model,
)


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute the regions the model checkpoints, and those the policy names.

    A region is one call of its module. Before a backward node of a region that reads its values,
    the forward nodes they come from are issued again, as far as they were not yet, from the
    region's inputs, which stay saved. So a region that backward enters at several places is
    recomputed part by part, each when it is needed. Random operators are not issued again: what
    they drew is saved (of a dropout only the mask), so backward sees the same random numbers, and
    the random stream is eager's.

    The idea is that of "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174) and of
    torch.utils.checkpoint; what `selective` keeps, see `graphshard.cost.op_cost`.

    Args:
        units: every call of every unit but the root is a region.
        classes: so is every call of the modules in `plan.recomputed`.
        selective: keep the results of matrix products, convolutions and attention.
    """

    units: bool = False
    classes: bool = False
    selective: bool = False

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, before parameters are unsharded.

        Raises:
            PassError: a backward node still reads what its region should have recomputed, or no
                module that the policy wants recomputed is called.
        """
        recompute_checkpoints(program, self.name)
        targets = {unit.fqn for unit in plan.units if unit.fqn} if self.units else set()
        if self.classes:
            require_calls(program, plan)
            targets |= set(plan.recomputed)
        if not targets:
            return

        def again(node: fx.Node) -> bool:
            return recomputable(node) and not (self.selective and is_compute_intensive(node))

        order = {node: place for place, node in enumerate(program.graph.nodes)}
        regions = list(reads_of_calls(program, targets))
        for reads in regions:
            inside = _Inside(reads, targets, again)
            rewrite(program, reads, inside, order, self.name)


def recompute_checkpoints(program: Program, name: str) -> None:
    """Recompute the calls of `torch.utils.checkpoint`, the innermost first.

    Raises:
        PassError: a backward node still reads what its region should have recomputed.
    """
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    for depth in reversed(range(checkpoint_depth(program))):
        for reads in list(reads_of_checkpoints(program, depth)):

            def again(node: fx.Node, reads: Reads = reads, depth: int = depth) -> bool:
                chain = checkpoints(node)
                inside = len(chain) > depth and chain[depth] == reads.region
                return inside and recomputable(node) and not saved_by_model(node)

            rewrite(program, reads, again, order, name)


def rewrite(
    program: Program, reads: Reads, again: NodePredicate, order: dict[fx.Node, int], name: str
) -> None:
    """Issue again what `again` says of one region, and check that every reader was rewritten.

    Raises:
        PassError: one was not.
    """
    issue_again(program.graph, reads, plan_issues(reads, again, order))
    for user, values in reads.by_user.items():
        for value in values:
            if again(value) and value in user.all_input_nodes:
                raise PassError(f"pass {name}: {user.name} still reads {value.name} from forward")


def require_calls(program: Program, plan: ShardingPlan) -> None:
    """Raise unless some module of the classes the policy recomputes is called.

    Raises:
        PassError: none is.
    """
    if program.grad and not _any_call(program.nodes(FORWARD), plan.recomputed):
        raise PassError(
            f"the policy recomputes {', '.join(plan.recomputed[:4])}, but the step computes "
            "nothing in a call of them; name the classes whose forward runs"
        )


def _any_call(nodes: Iterable[fx.Node], targets: Collection[str]) -> bool:
    return any(call_of(node, targets) is not None for node in nodes)


@dataclass(frozen=True)
class _Inside:
    """Whether a node of one call is to be issued again."""

    reads: Reads
    targets: Collection[str]
    wanted: NodePredicate

    def __call__(self, node: fx.Node) -> bool:
        return (
            not checkpoints(node)
            and call_of(node, self.targets) == self.reads.region
            and self.wanted(node)
        )
