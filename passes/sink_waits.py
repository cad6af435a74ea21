"""sink_waits: move each wait down to where its result, or its memory, is needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import unpacks
from graphshard.program.edit import follow_ups, issue_of
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Move the wait of a gather before its first use, and that of a reduce down as far as allowed.

    A reduce_scatter in flight holds the full gradients of its unit. Its wait stands before the
    reduce_scatter that would exceed `max_reduces_in_flight`, or at the end of backward. Waits of
    all_reduces stand at the end too, as their results stay in memory anyway. An all_reduce of the
    results of a wait is launched right behind the wait.

    Args:
        max_reduces_in_flight: number of reduce_scatters that may be in flight while backward
            continues. 0: each is waited for at once.
    """

    max_reduces_in_flight: int = 1

    def __post_init__(self) -> None:
        if self.max_reduces_in_flight < 0:
            raise PassError(
                f"pass {self.name}: max_reduces_in_flight must be 0 or more; "
                f"got {self.max_reduces_in_flight}"
            )

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        position = {node: index for index, node in enumerate(program.graph.nodes)}
        waits = [node for node in program.nodes() if node.target is ops.wait]
        scatters: list[fx.Node] = []
        reductions: list[fx.Node] = []
        for wait in waits:
            target = ops.collective_of(wait).target
            if target is ops.all_gather:
                _sink_gather(wait, position)
            else:
                reductions.append(wait)
                if ops.is_scatter(ops.collective_of(wait)):
                    scatters.append(wait)
        # At the end, launch all all_reduces over replicas before waiting for any of them.
        reductions.sort(key=lambda w: ops.group_of(ops.collective_of(w)) == ops.REPLICATE)
        limit = self.max_reduces_in_flight
        later_issue: dict[fx.Node, fx.Node] = {
            wait: issue_of(ops.collective_of(later))[0]
            for wait, later in zip(scatters, scatters[limit:], strict=False)
        }
        if not limit:
            reductions = [wait for wait in reductions if wait not in later_issue]
        for wait in reductions:
            _move_wait(wait, later_issue.get(wait, program.output_node))


def _sink_gather(wait: fx.Node, position: dict[fx.Node, int]) -> None:
    picked = unpacks(wait)
    users = [user for node in picked for user in node.users]
    if not users:
        return
    first = min(users, key=position.__getitem__)
    # A gather first used in backward ends in forward, since a pending value cannot be saved.
    if first.op == "call_function" and first.meta["phase"] == wait.meta["phase"]:
        _move_wait(wait, first)


def _move_wait(wait: fx.Node, before: fx.Node) -> None:
    picked = unpacks(wait)
    for node in (wait, *picked, *follow_ups(picked)):
        before.prepend(node)
