"""sink_waits: each wait moves down to where its result is needed, or its memory is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_after, transfers_into, unpacks
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program


@dataclass(frozen=True)
class SinkWaits(Pass):
    """Wait for a gather right before its first use, for a reduce_scatter when memory asks for it.

    A reduce_scatter still under way holds its unit's full gradients. Its wait stands before the
    reduce_scatter that would put more than the allowed number under way; all others, and those of
    all_reduces, whose results are kept anyway, stand at the end of backward. An all_reduce of what
    a wait returns is launched right behind it.

    Args:
        max_reduces_in_flight: how many units' full gradients may wait to be reduced while backward
            goes on. 0: each reduce_scatter is waited for at once.
    """

    max_reduces_in_flight: int = 1

    def __post_init__(self) -> None:
        if self.max_reduces_in_flight < 0:
            raise PassError(
                f"pass {self.name}: max_reduces_in_flight must be 0 or more; "
                f"got {self.max_reduces_in_flight}"
            )

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
        place = {node: index for index, node in enumerate(program.graph.nodes)}
        waits = [node for node in program.nodes() if node.target is ops.wait]
        scatters: list[fx.Node] = []
        reductions: list[fx.Node] = []
        for wait in waits:
            target = ops.collective_of(wait).target
            if target is ops.all_gather:
                _sink_gather(wait, place)
            else:
                reductions.append(wait)
                if ops.is_scatter(ops.collective_of(wait)):
                    scatters.append(wait)
        # What is not under way yet is launched before anything is waited for at the end.
        reductions.sort(key=lambda w: ops.group_of(ops.collective_of(w)) == ops.REPLICATE)
        limit = self.max_reduces_in_flight
        before: dict[fx.Node, fx.Node] = {
            wait: _issue_of(later) for wait, later in zip(scatters, scatters[limit:], strict=False)
        }
        if not limit:
            reductions = [wait for wait in reductions if wait not in before]
        for wait in reductions:
            _move(wait, before.get(wait, program.output_node))


def _issue_of(wait: fx.Node) -> fx.Node:
    """The first node of what `wait` waits for: the transfers of its operands, or it."""
    collective = ops.collective_of(wait)
    return next(iter(transfers_into(collective)), collective)


def _sink_gather(wait: fx.Node, place: dict[fx.Node, int]) -> None:
    picked = unpacks(wait)
    users = [user for node in picked for user in node.users]
    if not users:
        return
    first = min(users, key=place.__getitem__)
    # A gather first used in backward is waited for in forward: what is under way cannot be saved.
    if first.op == "call_function" and first.meta["phase"] == wait.meta["phase"]:
        _move(wait, first)


def _move(wait: fx.Node, before: fx.Node) -> None:
    picked = unpacks(wait)
    further = {transfer for one in picked for transfer in transfers_after(one)}
    further |= {n for one in (*picked, *further) for n in one.users if ops.is_collective(n)}
    for node in (wait, *picked, *sorted(further)):
        before.prepend(node)
