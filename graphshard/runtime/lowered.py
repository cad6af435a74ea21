"""Forward or backward of a program as a rank runs it, and the state that it is bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import Regions
from graphshard.runtime.accumulated import AccumulatedGrads
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.checked import CheckedRun
from graphshard.runtime.collectives import BoundCollective
from graphshard.runtime.cuda_graphs import GraphPool
from graphshard.runtime.fingerprint import Fingerprint
from graphshard.runtime.finite import FiniteReports
from graphshard.runtime.gather import AllGather
from graphshard.runtime.group import Group
from graphshard.runtime.lower import lower, phase_of
from graphshard.runtime.names import NamedRun
from graphshard.runtime.reduce import require_reducible
from graphshard.runtime.region import Form, Forms, RegionCall
from graphshard.runtime.shards import Shard
from graphshard.torch_private.profiling import profiler_check

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
    reports: what checks of programs found that was not finite.
    forms: the compiled forms of regions.
    graph_pool: what the CUDA graphs of its programs share.
    """

    plan: ShardingPlan
    group: Group
    shards: Mapping[str, Shard]
    buffers: Mapping[str, tuple[dict[str, Any], str]]
    agreement: Agreement
    accumulated: AccumulatedGrads = field(default_factory=AccumulatedGrads)
    forms: Forms = field(default_factory=Forms)
    reports: FiniteReports = field(init=False)
    graph_pool: GraphPool = field(init=False)

    def __post_init__(self) -> None:
        self.graph_pool = GraphPool(self.group.device)
        self.reports = FiniteReports(self.group)

    def buffer(self, name: str) -> Tensor:
        """The buffer `name` that the module has now."""
        holder, leaf = self.buffers[name]
        return holder[leaf]

    def set_buffer(self, name: str, tensor: Tensor) -> None:
        """Give the module's buffer `name`, under all its names, another tensor."""
        before = self.buffer(name)
        for holder, leaf in self.buffers.values():
            if holder[leaf] is before:
                holder[leaf] = tensor


class LoweredGraph:
    """Forward or backward of a program, lowered.

    module: its code.
    fingerprint: its sequence of collectives.
    """

    def __init__(self, graph: fx.Graph, bindings: Bindings, regions: Regions | None) -> None:
        require_reducible(graph, bindings.group)
        self.module = lower(
            graph,
            bindings.plan,
            bindings.group,
            bindings.accumulated,
            bindings.reports,
            bindings.forms,
            regions,
        )
        self.fingerprint = Fingerprint.of(graph, bindings.plan)
        self._check = bindings.group.check
        self._here = bindings.group.here
        self._run = self._runner(self.module) if self._check else self._first_run
        self._named: Runner | None = None
        self._profiled = profiler_check()

    def run(self, args: list[Any]) -> Any:
        """Run the code on `args`, which it empties; with checks in checking mode, or at first.

        While a profiler is on, each event has a range of its own.
        """
        return self._named_run(args) if self._profiled() else self._run(args)

    def finish(self, params: Sequence[Any]) -> None:
        """Take part in the collectives that a run did not come to, so that no rank waits for them.

        Gathers send this rank's shards, as in a run: what other ranks get is right. Reduces send
        poison, so all ranks must then raise an error.

        Args:
            params: in the places of the arguments, the parameters; None in those of others.
        """
        nodes = self.module.graph.nodes
        places = self.module.graph.find_nodes(op="placeholder")
        known: dict[fx.Node, Any] = dict(zip(places, params, strict=False))
        self._here.begun, self._here.done = 0, self._here.begun
        try:
            for node in nodes:
                if isinstance(node.target, BoundCollective):
                    gathers = isinstance(node.target, AllGather)
                    operands: Any = node.args[0]
                    node.target.take_part([_of(o, known) if gathers else None for o in operands])
                elif (take_part := getattr(node.target, "take_part", None)) is not None:
                    take_part(())
        finally:
            self._here.done = 0

    def _first_run(self, args: list[Any]) -> Any:
        """Hold the operands of regions and collectives against the program, this once."""
        results = CheckedRun(self.module, strict=False)(args)
        self._run = self.module.forward
        return results

    def _named_run(self, args: list[Any]) -> Any:
        if self._named is None:
            self._named = NamedRun(self.module, phase_of(self.module.graph), self._runner)
        return self._named(args)

    def _runner(self, module: fx.GraphModule) -> Runner:
        return CheckedRun(module, strict=True) if self._check else module.forward

    def forms(self) -> Iterator[Form]:
        """The forms of its regions, each once."""
        calls = (node.target for node in self.module.graph.nodes)
        return iter(dict.fromkeys(call.form for call in calls if isinstance(call, RegionCall)))


def _of(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of `node`, which is made of `known` ones by casts and the like; None if it is not.

    Those that were made of `known` ones are added to these.
    """
    if node not in known:
        sources = [_of(source, known) for source in node.all_input_nodes]
        lacks = not sources or any(source is None for source in sources)
        target: Any = None if isinstance(node.target, BoundCollective) else node.target
        known[node] = (
            None
            if lacks or target is None
            else target(*fx.map_arg(node.args, known.get), **fx.map_arg(node.kwargs, known.get))
        )
    return known[node]
