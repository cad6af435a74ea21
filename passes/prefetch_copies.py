"""prefetch_copies: issue copies to the device ahead of their use, so that compute hides them."""

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
    """Issue each copy to the device one step ahead, and wait for gradients late.

    A step lasts from the start of one unit's span to the start of the next one's. At the start of a
    step, gathers are issued first, then copies for later steps, and the copies that the step needs
    arrive last. A shard arrives where its gather is issued.

    The copy of a gradient to the host arrives, and its device memory is freed, where the next
    unit's gradients are sent; that of the last unit arrives at the end.

    Args:
        backward: "pre" issues the copies for a step of backward before the compute of the previous
            step. "post" issues activations after that compute, and shards, which are small, before
            it. None issues them where they are needed. Forward always uses "pre".
    """

    backward: str | None = "pre"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
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
        _delay_gradient_arrivals(program)


def _delay_gradient_arrivals(program: Program) -> None:
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
    """Copies to the device in order, by the step that they arrive before."""
    places = [spans.position[first] for first in firsts]
    by_step: dict[int, list[fx.Node]] = {}
    for copy in program.nodes(phase):
        if copy.target is ops.to_device:
            (arrive,) = copy.users
            step = sum(place < spans.position[arrive] for place in places)
            by_step.setdefault(step, []).append(copy)
    by_step.pop(len(firsts), None)  # copies that arrive after all compute
    return by_step


def _put_before(node: fx.Node, nodes: Sequence[fx.Node]) -> None:
    for each in nodes:
        node.prepend(each)


def _last_compute_before(first: fx.Node) -> fx.Node:
    node = first.prev
    while not ops.is_compute(node):
        node = node.prev
    return node
