"""recompute: compute activations again in backward instead of saving them."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError, PolicyError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import FORWARD, Program
from graphshard.recompute.redraw import redrawn, replay_draws
from graphshard.recompute.regions import (
    NodePredicate,
    Reads,
    Region,
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

KEPT = (
    "recomputed regions save what is drawn at random (of a dropout, its mask), since no CUDA graph "
    "can set the state of a generator to draw it again"
)
"""The note of a program that keeps its draws."""


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute the regions that the model checkpoints, and those that the policy names.

    A region is one call of a module. Its inputs stay saved. Before a backward node that reads a
    value of the region, the forward nodes that compute the value are issued again, unless they were
    already. So a region that backward enters at several places is recomputed in parts, each where
    it is needed. Random operators draw the same numbers again, from the state of the generator in
    forward, and the generator is then put back: the random stream equals eager's.

    Args:
        units: every call of every unit but the root is a region.
        classes: every call of the modules in `plan.recomputed` is a region.
        selective: save the results of matrix products, convolutions and attention; see
            `graphshard.recompute.regions`.
        keep_draws: save the results of random operators (of a dropout, its mask) instead.
        min_bytes: a region whose random results take fewer bytes keeps them; None: no more than
            the state that would be saved instead.
    """

    units: bool = False
    classes: bool = False
    selective: bool = False
    keep_draws: bool = False
    min_bytes: int | None = None

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, before `Unshard`."""
        targets = {unit.fqn for unit in plan.units if unit.fqn} if self.units else set()
        if self.classes:
            require_calls(program, plan)
            targets |= set(plan.recomputed)
        drawn = draws_to_repeat(program, targets, self.keep_draws, self.min_bytes)
        recompute_checkpoints(program, drawn)

        def is_chosen(node: fx.Node) -> bool:
            return recomputable(node, drawn) and not (self.selective and is_compute_intensive(node))

        if targets:
            order = {node: place for place, node in enumerate(program.graph.nodes)}
            for reads in list(reads_of_calls(program, targets)):
                inside = _Inside(reads, targets, is_chosen)
                rewrite(program, reads, inside, order)
        if not self.keep_draws:
            replay_draws(program)


def draws_to_repeat(
    program: Program,
    targets: Collection[str],
    keep_draws: bool,
    min_bytes: int | None = None,
) -> frozenset[fx.Node]:
    """The draws that backward repeats in checkpoints and in calls of `targets`.

    Notes on the program if all are kept. The arguments are those of `Recompute`.
    """

    def region_of(node: fx.Node) -> Region | None:
        return (checkpoints(node) or (call_of(node, targets),))[-1]

    drawn = redrawn(program, region_of, min_bytes)
    if not keep_draws:
        return drawn
    if drawn:
        program.notes = (*program.notes, KEPT)
    return frozenset()


def recompute_checkpoints(program: Program, drawn: Container[fx.Node]) -> None:
    """Recompute the calls of `torch.utils.checkpoint`, innermost first, without `replay_draws`.

    `drawn` are the draws that backward repeats.
    """
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    for depth in reversed(range(checkpoint_depth(program))):
        for reads in list(reads_of_checkpoints(program, depth)):

            def is_chosen(node: fx.Node, reads: Reads = reads, depth: int = depth) -> bool:
                chain = checkpoints(node)
                inside = len(chain) > depth and chain[depth] == reads.region
                return inside and recomputable(node, drawn) and not saved_by_model(node)

            rewrite(program, reads, is_chosen, order)


def rewrite(
    program: Program, reads: Reads, chosen: NodePredicate, order: dict[fx.Node, int]
) -> None:
    """Issue the `chosen` nodes of one region again, and let backward read them."""
    issue_again(program, reads, plan_issues(reads, chosen, order))
    for user, values in reads.by_user.items():
        for value in values:
            if chosen(value) and value in user.all_input_nodes:
                raise PassError(f"{user.name} still reads {value.name} from forward")


def require_calls(program: Program, plan: ShardingPlan) -> None:
    """Check that the step computes something in a call of a module that the policy recomputes."""
    if program.grad and not any(
        call_of(node, plan.recomputed) is not None for node in program.nodes(FORWARD)
    ):
        raise PolicyError(
            f"the policy recomputes {', '.join(plan.recomputed[:4])}, but the step computes "
            "nothing in a call of them that it needs; name the classes whose forward it needs"
        )


@dataclass(frozen=True)
class _Inside:
    """Whether to issue a node of one call again."""

    reads: Reads
    targets: Collection[str]
    chosen: NodePredicate

    def __call__(self, node: fx.Node) -> bool:
        return (
            not checkpoints(node)
            and call_of(node, self.targets) == self.reads.region
            and self.chosen(node)
        )
