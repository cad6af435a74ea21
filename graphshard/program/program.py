"""The program: one `fx.Graph` holding a whole step, with tables that say what each end of it means.

Layout of the graph, kept by every pass:

    placeholders   parameters, buffers, constants, inputs, tangents, in the order of the tables
    forward        nodes with meta["phase"] == "forward"
    backward       nodes with meta["phase"] == "backward" (none in a forward-only program)
    output         four lists: outputs, mutations, grads, input_grads, aligned with
                   `Program.outputs`, `.mutations`, `.params`, `.inputs`; None where none

Every node but the output carries in `meta`:

    "val"    its value as a FakeTensor (or a tuple or list of them, or a plain number, or None)
    "phase"  "forward" or "backward"
    "fqn"    the module it came from ("" is the root)
    "unit"   the FQN of the innermost unit around that module (set once a plan is known)
    "region" the number of the region it is compiled in, if it is (see `graphshard.program.regions`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.annotations import Budget, CudaGraphs, Regions
from graphshard.program.sizes import Sizes

RECOMPUTED = "recomputed"
"""In the meta of each node that computes again what forward computed."""


Signature = tuple[Any, ...]


_INT = frozenset({int})


def signatures(values: list[Any]) -> tuple[Signature, ...]:
    """Shape and dtype of each of a list of nodes (or of None)."""
    return tuple(
        signature(value.meta.get("val")) if isinstance(value, fx.Node) else (value is None,)
        for value in values
    )


def signature(val: Any) -> Signature:
    """Shape and dtype of a value, comparable without asking symbolic sizes anything."""
    if isinstance(val, torch.Tensor):
        shape: tuple[Any, ...] = tuple(val.shape)
        if not _INT.issuperset(map(type, shape)):
            shape = tuple([s if type(s) is int else str(s) for s in shape])
        return shape, val.dtype
    if isinstance(val, (tuple, list)):
        return tuple(map(signature, val))
    return (type(val).__name__,)


FORWARD = "forward"


BACKWARD = "backward"


COMPUTE = "compute"
"""The `op` of an event that is the model's own work."""


@dataclass(frozen=True)
class Event:
    """One line of a schedule.

    op is "compute" or a vocabulary name ("all_gather", "wait", "free", "reduce_scatter",
    "all_reduce", "cast", "to_device", "to_host", "arrive", "keep", "add_kept"); unit a unit's FQN;
    phase "forward" or "backward".
    """

    op: str
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"{self.phase:<8}  {self.op:<14}  {self.unit or '(root)'}"


@dataclass(frozen=True)
class ParamEntry:
    """A parameter of the program; a tied parameter has one entry with all its names."""

    fqn: str
    names: tuple[str, ...]  # every name it goes by, fqn first
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    node: fx.Node
    ignored: bool = False  # in no unit: whole on every rank, its gradient that rank's own

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class BufferEntry:
    """A buffer of the model (`constant` False) or a plain tensor the model closes over (True)."""

    fqn: str
    names: tuple[str, ...]
    node: fx.Node
    constant: bool = False
    value: torch.Tensor | None = field(default=None, compare=False)  # itself, for a constant


@dataclass(frozen=True)
class InputEntry:
    """A tensor the caller passes; `path` is how the user wrote it, e.g. "args[0]"."""

    path: str
    node: fx.Node
    requires_grad: bool = False


@dataclass(frozen=True)
class OutputEntry:
    """A tensor the model returns; `tangent` is its gradient's placeholder, None if it has none."""

    path: str
    tangent: fx.Node | None


@dataclass(frozen=True)
class MutationEntry:
    """A buffer or input whose new value the forward computes; `target` is its placeholder."""

    kind: str  # "buffer" | "input"
    name: str  # buffer FQN or input path
    target: fx.Node


@dataclass
class Results:
    """The four lists of the output node."""

    outputs: list[Any]
    mutations: list[Any]
    grads: list[Any]
    input_grads: list[Any]

    def as_args(self) -> tuple[Any, ...]:
        """The `args` of the graph's output node."""
        return ((self.outputs, self.mutations, self.grads, self.input_grads),)


@dataclass
class Program:
    """A captured or rewritten step. Passes edit `graph` in place; the tables name its ends."""

    graph: fx.Graph
    params: tuple[ParamEntry, ...]
    buffers: tuple[BufferEntry, ...]
    inputs: tuple[InputEntry, ...]
    outputs: tuple[OutputEntry, ...]
    mutations: tuple[MutationEntry, ...]
    training: bool
    grad: bool  # False: a forward-only program
    capture_device: str = "cpu"  # whose operators were traced
    device: str = "cpu"  # that it runs on
    mesh_shape: tuple[int, ...] = (1,)  # (ranks,) or (replicas, ranks to shard over)
    # Parameters of which ranks keep all (SHARD_OPTIMIZER) and other ranks have changed their parts:
    # they enter as shards and are gathered. The others of that kind enter whole.
    stale: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())  # what a reader of the dump must know
    sizes: Sizes | None = None  # the symbolic ones; None if every size is a number
    budget: Budget | None = None  # what it is scheduled in, if by cost
    cuda_graphs: CudaGraphs | None = None  # whether it is captured as graphs, if that was asked
    regions: Regions | None = None  # what of it is compiled; None if it runs operator by operator

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.mesh_shape)

    @property
    def shard_size(self) -> int:
        """Ranks that a sharded parameter is split over."""
        return self.mesh_shape[-1]

    # -- ends ---------------------------------------------------------------------------------

    @property
    def output_node(self) -> fx.Node:
        """The graph's single output node."""
        return self.graph.output_node()

    def results(self) -> Results:
        """The output node's lists, as fresh mutable lists (see `set_results`)."""
        return Results(
            *(list(part) for part in cast("tuple[list[Any], ...]", self.output_node.args[0]))
        )

    def set_results(self, results: Results) -> None:
        """Replace the output node's lists."""
        self.output_node.args = results.as_args()

    def nodes(self, phase: str | None = None) -> Iterator[fx.Node]:
        """All `call_function` nodes in order, of one phase if given."""
        for node in self.graph.nodes:
            if node.op == "call_function" and (phase is None or node.meta["phase"] == phase):
                yield node

    def first_backward(self) -> fx.Node:
        """The first node of the backward phase, or the output node if there is none."""
        for node in self.nodes(BACKWARD):
            return node
        return self.output_node

    # -- views --------------------------------------------------------------------------------

    def timeline(self) -> Iterator[tuple[Event, list[fx.Node]]]:
        """Every event with its nodes: communication one by one, runs of a unit's compute as one.

        So are runs of a unit's transfers of one kind, and of reshards. A release belongs to the
        compute before it. The nodes that pick results out of a `wait` belong to no event.
        """
        event: Event | None = None
        nodes: list[fx.Node] = []
        for node in self.nodes():
            if ops.is_unpack(node):
                continue
            if node.target is ops.release:
                if event is not None and event.op == COMPUTE:
                    nodes.append(node)
                continue
            op = ops.op_of(node)
            name = COMPUTE if op is None else op.name
            found = Event(name, node.meta.get("unit", ""), node.meta["phase"])
            merges = op is None or op.in_runs
            if event is not None and (found != event or not merges):
                yield event, nodes
                nodes = []
            event = found
            nodes.append(node)
        if event is not None:
            yield event, nodes

    def schedule(self) -> list[Event]:
        """The program's events, in order."""
        return [event for event, _ in self.timeline()]

    def copy(self) -> Program:
        """An independent program: another graph, tables that point into it."""
        graph, remap = _copied(self.graph)

        def moved(node: fx.Node | None) -> fx.Node | None:
            return None if node is None else remap[node]

        return replace(
            self,
            graph=graph,
            params=tuple(replace(p, node=remap[p.node]) for p in self.params),
            buffers=tuple(replace(b, node=remap[b.node]) for b in self.buffers),
            inputs=tuple(replace(i, node=remap[i.node]) for i in self.inputs),
            outputs=tuple(replace(o, tangent=moved(o.tangent)) for o in self.outputs),
            mutations=tuple(replace(m, target=remap[m.target]) for m in self.mutations),
        )

    def __str__(self) -> str:
        from graphshard.program.text import schedule_text

        return schedule_text(self)


def _copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of `graph`, whose nodes share their values with it, and its nodes by those of `graph`.

    `Graph.graph_copy` copies `meta` twice, and each node as `Graph.node_copy` does.
    """
    made = fx.Graph(tracer_cls=graph._tracer_cls)
    remap: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        remap[node] = copy_node(made, node, remap)
    return made, remap


def copy_node(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, Any]) -> fx.Node:
    """Append `node` to `graph`, reading for each node what `new` has for it.

    `Graph.node_copy` takes twice the time: it looks through every argument for symbolic sizes. An
    argument set afterwards is not looked through.
    """
    copied = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copied.args = fx.map_arg(node.args, new.__getitem__)
    if node.kwargs:
        copied.kwargs = fx.map_arg(node.kwargs, new.__getitem__)
    copied.meta.update(node.meta)
    return copied
