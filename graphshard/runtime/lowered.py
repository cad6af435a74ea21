"""Forward or backward of a program as a rank runs it, and the state that it is bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import Regions
from graphshard.runtime.accumulated import AccumulatedGrads
from graphshard.runtime.checked import CheckedRun
from graphshard.runtime.fingerprint import Agreement, Fingerprint
from graphshard.runtime.group import Group
from graphshard.runtime.lower import lower
from graphshard.runtime.reduce import require_reducible
from graphshard.runtime.region import Form, Forms, RegionCall
from graphshard.runtime.shards import Shard

Runner = Callable[[list[Any]], Any]


@dataclass
class Bindings:
    """The state of a module that its lowered programs read and write.

    plan: the module's plan.
    group: all ranks.
    shards: this rank's shards by parameter name.
    buffers: by buffer name, the dict that holds the module's buffer and its key there.
    agreement: compares the ranks' collectives.
    accumulated: gradients that were not reduced yet.
    forms: the compiled forms of regions.
    """

    plan: ShardingPlan
    group: Group
    shards: Mapping[str, Shard]
    buffers: Mapping[str, tuple[dict[str, Any], str]]
    agreement: Agreement
    accumulated: AccumulatedGrads = field(default_factory=AccumulatedGrads)
    forms: Forms = field(default_factory=Forms)

    def buffer(self, name: str) -> Tensor:
        """The buffer `name` that the module has now."""
        holder, leaf = self.buffers[name]
        return holder[leaf]


class LoweredGraph:
    """Forward or backward of a program, lowered.

    module: its code.
    run: runs the code on a list of arguments, which it empties; with checks in checking mode.
    fingerprint: its sequence of collectives.

    Raises:
        PlanError: it reduces a gradient that the ranks cannot average.
    """

    def __init__(self, graph: fx.Graph, bindings: Bindings, regions: Regions | None) -> None:
        require_reducible(graph, bindings.group)
        self.module = lower(
            graph, bindings.plan, bindings.group, bindings.accumulated, bindings.forms, regions
        )
        self.fingerprint = Fingerprint.of(graph, bindings.plan)
        check = bindings.group.check
        self.run: Runner = CheckedRun(self.module) if check else self.module.forward

    def forms(self) -> Iterator[Form]:
        """The forms of its regions, each once."""
        calls = (node.target for node in self.module.graph.nodes)
        return iter(dict.fromkeys(call.form for call in calls if isinstance(call, RegionCall)))
