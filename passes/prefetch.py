"""prefetch: gathers are issued ahead of their use, behind the compute that is to hide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_into
from graphshard.program.collective import Collective
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import UnitSpan, find_spans, gathers_by_span


@dataclass(frozen=True)
class Prefetch(Pass):
    """Move gathers to where the policy wants them issued; their order among each other stays.

    Runs are taken in the order of their first compute node, the root's among them; runs that start
    together count as one.

    Args:
        backward: "pre" issues a run's gather before the compute of the run before it; "post" after
            that compute, before its gradients are reduced; None at the run itself.
        forward: how many runs ahead a gather is issued in forward.
    """

    backward: str | None = "pre"
    forward: int = 0

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: a gather serves no run of its unit.
        """
        spans = find_spans(program, plan)
        gathers = gathers_by_span(spans)
        unserved = {n for n in program.nodes() if n.target is ops.all_gather} - set(
            gathers.values()
        )
        if unserved:
            node = min(unserved, key=spans.position.__getitem__)
            raise PassError(
                f"pass {self.name}: {node.name} of unit {Collective.of(node).unit!r} serves no run "
                "of its unit; gather only what the unit's own compute reads"
            )

        def sequence(phase: str) -> list[UnitSpan]:
            return [
                run
                for run in spans.in_order
                if run.phase == phase and (run in gathers or not run.unit)
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

    Runs that start at one node (a unit and one inside it) are one step: issuing the inner gather
    where the outer run starts would hide nothing of it.
    """
    if not ahead:
        return
    after_own: dict[str, int] = {}  # by unit, the step after its last run so far
    firsts: list[fx.Node] = []  # by step
    latest = 0  # where the gather before was issued: none overtakes another
    for step, (_, group) in enumerate(groupby(sequence, key=lambda run: run.start)):
        spans = list(group)
        firsts.append(spans[0].first)
        for run in spans:
            # Never while the unit's previous run still holds its parameters: that is twice the
            # memory, and hides nothing more.
            at = max(step - ahead, after_own.get(run.unit, 0), latest)
            if run in gathers:
                latest = at
                if at < step:
                    for node in _issued(gathers[run]):
                        firsts[at].prepend(node)
            after_own[run.unit] = step + 1


def _issue_after_compute(sequence: Sequence[UnitSpan], gathers: dict[UnitSpan, fx.Node]) -> None:
    """Issue each gather right after the compute of the run before it, if that is over by then."""
    for before, run in pairwise(sequence):
        if run in gathers and before.stop < run.start and before.unit != run.unit:
            last = before.last
            for node in _issued(gathers[run]):
                last.append(node)
                last = node


def _issued(gather: fx.Node) -> list[fx.Node]:
    """What is issued with `gather`: the transfers of its shards, then it."""
    return [*transfers_into(gather), gather]
