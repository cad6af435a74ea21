"""partial_reshard: between forward and backward small groups of ranks keep parameters in parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits
from graphshard.program.edit import (
    entries_by_name,
    erase_dead,
    fake_like,
    insert_gather,
    insert_node,
    prune_gather,
    rewire,
)
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, Program
from graphshard.program.spans import (
    UnitSpan,
    UnitSpans,
    end_of,
    find_spans,
    gathers_by_span,
    readers_by_unit,
    spans_served,
    unit_ancestry,
)


@dataclass(frozen=True)
class PartialReshard(Pass):
    """Backward gathers from a small group what the group's ranks kept of forward's gather.

    For units that the plan reshards to k ranks. Where the last forward run that gathered a
    parameter ends, each rank copies its one of k parts out of the full value; backward's gathers
    join the k ranks only, as ranks of one node do under ZeRO++'s hpZ (arXiv:2306.10209) and under
    `reshard_after_forward=k` of torch's `fully_shard`. In exchange 1/k of the unit stays on each
    rank from forward to backward.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: backward reads a parameter that no gather in forward has.
        """
        if not any(unit.options.reshard_ranks for unit in plan.units):
            return
        spans = find_spans(program, plan)
        entries = entries_by_name(program)
        kept = _Kept(self, program, plan, spans)
        wanted = {
            unit: spans_served(unit, BACKWARD, readers, spans)
            for unit, readers in readers_by_unit(spans).items()
            if plan.unit(unit).options.reshard_ranks
        }
        kept.insert((unit, name) for unit, s in wanted.items() for _, used, _ in s for name in used)
        for unit, served in wanted.items():
            for run, params, inside in served:
                values = insert_gather(
                    program,
                    plan,
                    unit,
                    params,
                    entries=entries,
                    before=run.first,
                    phase=BACKWARD,
                    parts=kept.parts,
                )
                rewire(inside, spans.derived, values, unit=unit)
        erase_dead(node for node in spans.derived if node.op != "placeholder")
        for wait in list(gather_waits(program)):
            prune_gather(wait)


class _Kept:
    """What ranks keep of each parameter, in `parts` once inserted."""

    def __init__(
        self, owner: PartialReshard, program: Program, plan: ShardingPlan, spans: UnitSpans
    ) -> None:
        self.owner, self.program, self.plan = owner, program, plan
        self.parts: dict[str, fx.Node] = {}
        run_of = {gather: run for run, gather in gathers_by_span(spans).items()}
        self.latest: dict[str, tuple[fx.Node, UnitSpan]] = {}
        for node, source in spans.derived.items():  # in graph order
            if source.node is node and ops.is_unpack(node):
                self.latest[source.param] = node, run_of[ops.collective_of(node)]

    def insert(self, wanted: Iterable[tuple[str, str]]) -> None:
        """A `reshard` of each (unit, parameter), inner units first where several end together."""
        place = {name: index for index, name in enumerate(self.plan.layouts)}
        sites: list[tuple[int, int, int, str, str]] = []
        for unit, name in set(wanted):
            if name not in self.latest:
                raise PassError(
                    f"pass {self.owner.name}: backward reads {name!r} of unit {unit!r}, which no "
                    "gather in forward has; run the pass after unshard and before regather"
                )
            depth = len(unit_ancestry(unit, self.plan))
            sites.append((self.latest[name][1].stop, -depth, place[name], unit, name))
        for _, _, _, unit, name in sorted(sites):
            full, run = self.latest[name]
            ranks = self.plan.unit(unit).options.reshard_ranks
            assert ranks is not None
            shape = self.plan.layouts[name].over(ranks).shard_shape
            with self.program.graph.inserting_after(end_of(run, self.plan)):
                self.parts[name] = insert_node(
                    self.program,
                    ops.reshard,
                    (full,),
                    {"ranks": ranks, "unit": unit, "param": name},
                    name=f"{name}_part",
                    unit=unit,
                    phase=run.phase,
                    val=fake_like(full.meta["val"], shape),
                )
