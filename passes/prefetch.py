"""prefetch: issue gathers ahead of their use, so that compute hides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective
from graphshard.program.edit import issue_of
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import UnitSpan, find_spans, gathers_by_span


@dataclass(frozen=True)
class Prefetch(Pass):
    """Issue gathers where the policy asks for, without changing their order.

    Spans of units, including the root's, are ordered by their first compute node. Spans that start
    at the same node count as one.

    Args:
        backward: "pre" issues the gather of a span before the compute of the previous span. "post"
            issues it after that compute, before the reduce of its gradients. None issues it at the
            start of its own span.
        forward: number of spans ahead that a gather is issued in forward.
    """

    backward: str | None = "pre"
    forward: int = 0

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        spans = find_spans(program, plan)
        gathers = gathers_by_span(spans)
        unserved = {n for n in program.nodes() if n.target is ops.all_gather} - set(
            gathers.values()
        )
        if unserved:
            node = min(unserved, key=spans.position.__getitem__)
            raise PassError(
                f"pass {self.name}: {node.name} of unit {Collective.of(node).unit!r} serves no "
                "span of its unit; gather only parameters that the unit's own compute reads"
            )

        def sequence(phase: str) -> list[UnitSpan]:
            return [
                span
                for span in spans.in_order
                if span.phase == phase and (span in gathers or not span.unit)
            ]

        forward, backward = sequence(FORWARD), sequence(BACKWARD)
        _issue_before_compute(forward, gathers, self.forward)
        if self.backward == "pre":
            _issue_before_compute(backward, gathers, 1)
        elif self.backward == "post":
            _issue_after_compute(backward, gathers)


def _issue_before_compute(
    sequence: Sequence[UnitSpan], gathers: dict[UnitSpan, fx.Node], ahead: int
) -> None:
    """Issue each gather right before the first compute node `ahead` steps earlier.

    Spans that start at one node (a unit and one inside it) are one step, since no compute between
    them could hide the inner gather.
    """
    if not ahead:
        return
    earliest: dict[str, int] = {}  # by unit, the step after its latest span
    firsts: list[fx.Node] = []  # by step
    latest = 0  # step of the previous gather, which none may overtake
    for step, (_, group) in enumerate(groupby(sequence, key=lambda span: span.start)):
        spans = list(group)
        firsts.append(spans[0].first)
        for span in spans:
            # Not while the previous span of the unit still holds its parameters: that takes twice
            # the memory and hides nothing more.
            target = max(step - ahead, earliest.get(span.unit, 0), latest)
            if span in gathers:
                latest = target
                if target < step:
                    for node in issue_of(gathers[span]):
                        firsts[target].prepend(node)
            earliest[span.unit] = step + 1


def _issue_after_compute(sequence: Sequence[UnitSpan], gathers: dict[UnitSpan, fx.Node]) -> None:
    """Issue each gather right after the compute of the previous span, if that ends before it."""
    for before, span in pairwise(sequence):
        if span in gathers and before.stop < span.start and before.unit != span.unit:
            last = before.last
            for node in issue_of(gathers[span]):
                last.append(node)
                last = node
