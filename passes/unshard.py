"""unshard: replace parameters by shards, gathered for each forward span of their unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.aliases import derived_values, gather_waits
from graphshard.program.edit import (
    entries_by_name,
    erase_dead,
    fake_like,
    insert_gather,
    insert_node,
    rewire,
)
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, FORWARD, ParamEntry, Program
from graphshard.program.spans import (
    Served,
    UnitSpan,
    UnitSpans,
    find_spans,
    params_read,
    readers_by_unit,
    spans_served,
)


@dataclass(frozen=True)
class Unshard(Pass):
    """Replace each sharded parameter by its shard, and gather it before each span that needs it.

    Uses in backward read the last gather of forward; `Regather` decides what backward gathers
    again. A unit that the plan does not reshard after forward is gathered once, before its first
    forward span, for the whole step.
    """

    establishes: ClassVar[Stage] = Stage.GATHERED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if any(gather_waits(program)):
            raise PassError(f"pass {self.name}: the program is unsharded already; run it once")
        _copy_returned(program, plan)
        spans = find_spans(program, plan)
        entries = entries_by_name(program)
        readers = readers_by_unit(spans)
        for unit, nodes in readers.items():
            _Unit(program, plan, spans, entries, unit, nodes).rewrite()
        erase_dead(node for node in spans.derived if node.op != "placeholder")
        for param in program.params:
            layout = plan.layouts[param.fqn]
            if layout.enters_as_shard(program.stale):
                param.node.meta["val"] = fake_like(param.node.meta["val"], layout.shard_shape)


@dataclass
class _Unit:
    """The rewrite of one unit; `readers` are the nodes that read its parameters, in order."""

    program: Program
    plan: ShardingPlan
    spans: UnitSpans
    entries: Mapping[str, ParamEntry]
    unit: str
    readers: list[fx.Node]

    def rewrite(self) -> None:
        served = spans_served(self.unit, FORWARD, self.readers, self.spans)
        backward = [node for node in self.readers if node.meta["phase"] == BACKWARD]
        backward_params = params_read(backward, self.spans.derived, self.unit)
        if not served and backward_params:
            served = self._last_span(backward_params)
        if not self.plan.unit(self.unit).options.reshard and served:
            span, _, _ = served[0]
            all_params = params_read(self.readers, self.spans.derived, self.unit)
            later = [node for node in self.readers if self.spans.position[node] >= span.start]
            self._rewire(later, self._gather(span, all_params))
            return
        latest: dict[str, fx.Node] = {}
        rewired: list[fx.Node] = []
        for index, (span, params, inside) in enumerate(served):
            if index == len(served) - 1:
                missing = backward_params - {p for _, used, _ in served for p in used}
                params = params | missing
            values = self._gather(span, params)
            latest.update(values)
            rewired += self._rewire(inside, values)
        self._rewire(backward, latest, rewired)

    def _gather(self, span: UnitSpan, params: Iterable[str]) -> dict[str, fx.Node]:
        return insert_gather(
            self.program,
            self.plan,
            self.unit,
            params,
            entries=self.entries,
            before=span.first,
            phase=span.phase,
        )

    def _rewire(
        self,
        readers: Iterable[fx.Node],
        values: Mapping[str, fx.Node],
        rewired: Iterable[fx.Node] = (),
    ) -> list[fx.Node]:
        return rewire(readers, self.spans.derived, values, unit=self.unit, rewired=rewired)

    def _last_span(self, params: set[str]) -> list[Served]:
        """The unit's last forward span, to gather parameters that only backward reads."""
        spans = self.spans.of(self.unit, FORWARD)
        if not spans:
            raise PassError(
                f"backward reads {sorted(params)} of unit {self.unit!r}, "
                "but no node of that unit is in forward; put the parameter in the unit of the "
                "module that uses it"
            )
        return [(spans[-1], set(), [])]


def _copy_returned(program: Program, plan: ShardingPlan) -> None:
    """Let the step return copies of parameters, since the storage of these will be freed."""
    derived = derived_values(program, plan)
    results = program.results()
    copies: dict[tuple[fx.Node, str], fx.Node] = {}

    def copy_of(value: object, phase: str, before: fx.Node) -> object:
        if not isinstance(value, fx.Node) or value not in derived:
            return value
        if (value, phase) not in copies:
            with program.graph.inserting_before(before):
                copies[value, phase] = insert_node(
                    program,
                    torch.ops.aten.clone.default,
                    (value,),
                    name=f"{value.name}_returned",
                    unit=derived[value].unit,
                    phase=phase,
                    val=value.meta["val"],
                )
        return copies[value, phase]

    border, end = program.first_backward(), program.output_node
    results.outputs = [copy_of(v, FORWARD, border) for v in results.outputs]
    results.mutations = [copy_of(v, FORWARD, border) for v in results.mutations]
    results.grads = [copy_of(v, BACKWARD, end) for v in results.grads]
    results.input_grads = [copy_of(v, BACKWARD, end) for v in results.input_grads]
    program.set_results(results)
