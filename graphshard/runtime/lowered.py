"""LoweredGraph of a program as a rank runs it, and what it runs on."""

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
    """What a step runs on: this rank's shards, by name, the module's buffers, by name, and the
    gradients it keeps.
    """

    plan: ShardingPlan
    group: Group
    shards: Mapping[str, Shard]
    buffers: Mapping[str, tuple[dict[str, Any], str]]  # the dict that holds it, its name there
    agreement: Agreement
    kept: AccumulatedGrads = field(default_factory=AccumulatedGrads)
    forms: Forms = field(default_factory=Forms)

    def buffer(self, name: str) -> Tensor:
        """The module's present buffer `name`."""
        holder, leaf = self.buffers[name]
        return holder[leaf]


class LoweredGraph:
    """LoweredGraph of a program, lowered: its code and the fingerprint of what it does between
    ranks.
    """

    def __init__(self, graph: fx.Graph, bindings: Bindings, regions: Regions | None) -> None:
        require_reducible(graph, bindings.group)
        self.module = lower(
            graph, bindings.plan, bindings.group, bindings.kept, bindings.forms, regions
        )
        self.fingerprint = Fingerprint.of(graph, bindings.plan)
        check = bindings.group.check
        self.run: Runner = CheckedRun(self.module) if check else self.module.forward

    def forms(self) -> Iterator[Form]:
        """What is compiled for its regions, each form once."""
        calls = (node.target for node in self.module.graph.nodes)
        return iter(dict.fromkeys(call.form for call in calls if isinstance(call, RegionCall)))
