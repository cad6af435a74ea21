"""regather: gather parameters again in backward instead of keeping them from forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.aliases import derived_values, gather_waits
from graphshard.program.edit import entries_by_name, erase_dead, insert_gather, prune_gather, rewire
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import Served, UnitSpans, find_spans, readers_by_unit, spans_served


@dataclass(frozen=True)
class Regather(Pass):
    """Insert a gather before each backward span of a unit, so that forward's can be freed.

    Views, casts and copies of a parameter in forward are computed again from the new gather. Other
    values computed from parameters are saved like any activation. Units that the plan does not
    reshard after forward, or that `PartialReshard` handled, do not change.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        spans = find_spans(program, plan)
        served = {
            unit: spans_served(unit, BACKWARD, readers, spans)
            for unit, readers in readers_by_unit(spans).items()
            if plan.unit(unit).options.reshard is True
        }
        gather_in_backward(program, plan, spans, served)
        self._check(program, plan)

    def _check(self, program: Program, plan: ShardingPlan) -> None:
        for value, source in derived_values(program, plan).items():
            if source.node.meta["phase"] != FORWARD or not plan.unit(source.unit).options.reshard:
                continue
            for user in value.users:
                if user.op == "call_function" and user.meta["phase"] == BACKWARD:
                    raise PassError(
                        f"pass {self.name}: node {user.name} in backward still reads "
                        f"{value.name}, made from parameter {source.param!r} of unit "
                        f"{source.unit!r} as gathered in forward"
                    )


def gather_in_backward(
    program: Program,
    plan: ShardingPlan,
    spans: UnitSpans,
    served: Mapping[str, list[Served]],
    parts: Mapping[str, fx.Node] | None = None,
) -> None:
    """Gather before each span of backward in `served`, by unit, and drop what nobody reads then.

    `parts` is that of `insert_gather`.
    """
    entries = entries_by_name(program)
    for unit, spans_of_unit in served.items():
        for span, params, inside in spans_of_unit:
            values = insert_gather(
                program,
                plan,
                unit,
                params,
                entries=entries,
                before=span.first,
                phase=BACKWARD,
                parts=parts,
            )
            rewire(inside, spans.derived, values, unit=unit)
    erase_dead(node for node in spans.derived if node.op != "placeholder")
    for wait in list(gather_waits(program)):
        prune_gather(wait)
