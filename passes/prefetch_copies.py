"""prefetch_copies: copies to the device are issued ahead of their use, behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import param_of
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import UnitSpans, find_spans


@dataclass(frozen=True)
class PrefetchCopies(Pass):
    """Issue each copy to the device a step before it must have arrived; let gradients arrive late.

    A step reaches from where one unit's run starts to where the next one's does. Where a step
    starts gathers are issued first, then copies for later, and what the step needs arrives last.
    A shard arrives where its gather is issued.

    A gradient that goes to the host arrives, and its memory on the device is given back, where the
    next unit's gradients are sent; the last unit's at the end.

    Args:
        backward: "pre" issues what a step of backward needs before the compute of the step before
            it; "post" activations after that compute (shards, which are small, before it); None
            where it is needed. In forward it is always "pre".
    """

    backward: str | None = "pre"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
        spans = find_spans(program, plan)
        for phase, how in ((FORWARD, "pre"), (BACKWARD, self.backward)):
            firsts = spans.steps(phase)
            by_step = _copies_by_step(program, spans, firsts, phase)
            for step, copies in by_step.items():
                shards = [c for c in copies if param_of(c) is not None]
                activations = [c for c in copies if param_of(c) is None]
                if shards:
                    arrives = min(next(iter(copy.users)) for copy in shards)
                    ahead = how is not None and step > 0
                    _put_before(firsts[step - 1] if ahead else arrives, shards)
                if how == "pre":
                    _put_before(firsts[max(step - 1, 0)], activations)
                elif how == "post" and step:
                    _put_before(_last_compute_before(firsts[step]).next, activations)
            for step, copies in by_step.items():
                activations = [c for c in copies if param_of(c) is None]
                _put_before(firsts[step], [next(iter(copy.users)) for copy in activations])
        _let_gradients_arrive(program)


def _let_gradients_arrive(program: Program) -> None:
    sent = [n for n in program.nodes(BACKWARD) if n.target is ops.to_host]
    groups = [list(group) for _, group in groupby(sent, key=lambda node: node.meta["unit"])]
    later = [*(group[0] for group in groups[1:]), program.output_node]
    for group, before in zip(groups, later, strict=False):
        arrivals = [next(iter(copy.users)) for copy in group]
        if all(user.op == "output" for arrival in arrivals for user in arrival.users):
            _put_before(before, arrivals)


def _copies_by_step(
    program: Program, spans: UnitSpans, firsts: Sequence[fx.Node], phase: str
) -> dict[int, list[fx.Node]]:
    """Copies to the device by the step before whose first node they arrive, in order."""
    places = [spans.position[first] for first in firsts]
    found: dict[int, list[fx.Node]] = {}
    for copy in program.nodes(phase):
        if copy.target is ops.to_device:
            (arrive,) = copy.users
            step = sum(place < spans.position[arrive] for place in places)
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
