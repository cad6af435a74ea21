"""prefetch_copies: copies to the device are issued ahead of their use, behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from graphshard import ops
from graphshard.plan import ShardingPlan
from graphshard.program import BACKWARD, FORWARD, Program
from graphshard.runs import Runs, find_runs


@dataclass(frozen=True)
class PrefetchCopies:
    """Issue each copy to the device a step before it must have arrived.

    A step reaches from where one unit's run starts to where the next one's does. Where a step
    starts gathers are issued first, then copies for later, and what the step needs arrives last.
    A shard arrives where its gather is issued.

    Args:
        backward: "pre" issues what a step of backward needs before the compute of the step before
            it; "post" after that compute; None where it is needed. In forward it is always "pre":
            shards are small.
    """

    backward: str | None = "pre"
    name: str = field(default="prefetch_copies", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
        runs = find_runs(program, plan)
        for phase, how in ((FORWARD, "pre"), (BACKWARD, self.backward)):
            firsts = runs.steps(phase)
            by_step = _copies_by_step(program, runs, firsts, phase)
            for step, copies in by_step.items():
                if how == "pre":
                    _put_before(firsts[max(step - 1, 0)], copies)
                elif how == "post" and step:
                    _put_before(_last_compute_before(firsts[step]).next, copies)
            for step, copies in by_step.items():
                activations = [copy for copy in copies if ops.origin(copy).op != "placeholder"]
                _put_before(firsts[step], [next(iter(copy.users)) for copy in activations])


def _copies_by_step(
    program: Program, runs: Runs, firsts: Sequence[fx.Node], phase: str
) -> dict[int, list[fx.Node]]:
    """Copies to the device by the step before whose first node they arrive, in order."""
    places = [runs.position[first] for first in firsts]
    found: dict[int, list[fx.Node]] = {}
    for copy in program.nodes(phase):
        if copy.target is ops.to_device:
            (arrive,) = copy.users
            step = sum(place < runs.position[arrive] for place in places)
            found.setdefault(step, []).append(copy)
    found.pop(len(firsts), None)  # they arrive after all compute
    return found


def _put_before(node: fx.Node, moved: Sequence[fx.Node]) -> None:
    for one in moved:
        node.prepend(one)


def _last_compute_before(first: fx.Node) -> fx.Node:
    node = first.prev
    while not ops.is_compute(node):
        node = node.prev
    return node
