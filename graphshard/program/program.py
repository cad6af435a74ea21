"""The program: one `fx.Graph` that holds a whole step, and tables that describe its ends.

Every pass preserves this layout of the graph:

    placeholders   parameters, buffers, constants, inputs, tangents, in the order of the tables
    forward        nodes with meta["phase"] == "forward"
    backward       nodes with meta["phase"] == "backward" (none in a forward-only program)
    output         four lists: outputs, mutations, grads, input_grads, one value for each entry of
                   `Program.outputs`, `.mutations`, `.params`, `.inputs`; None for no value

Every node but the output carries in `meta`:

    "val"    its value as a FakeTensor (or a tuple or list of them, or a plain number, or None)
    "phase"  "forward" or "backward"
    "fqn"    the FQN of the module it came from ("" is the root)
    "unit"   the FQN of the innermost unit around that module (set once there is a plan)
    "replays" the node of forward whose random numbers it draws again, by name
    "region" the number of the region it is compiled in, if any (see `graphshard.program.regions`)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.annotations import Budget, CudaGraphs, Regions
from graphshard.program.sizes import Sizes
from graphshard.torch_private.compat import SYMBOLIC

RECOMPUTED = "recomputed"
"""The key of `node.meta` on nodes of backward that recompute a value of forward."""


REPLAYS = "replays"
"""The key of `node.meta` on nodes of backward that draw random numbers again: the forward node's
name."""


Signature = tuple[Any, ...]


_INT = frozenset({int})


def signatures(values: list[Any]) -> tuple[Signature, ...]:
    """Shape and dtype of each node in a list; entries may be None."""
    return tuple(
        signature(value.meta.get("val")) if isinstance(value, fx.Node) else (value is None,)
        for value in values
    )


def signature(val: Any) -> Signature:
    """Shape and dtype of a value, to compare values without adding a guard on symbolic sizes."""
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
"""The `op` of an event of the model's own compute."""


@dataclass(frozen=True)
class Event:
    """One line of a schedule.

    Attributes:
        op: "compute", or the name of an op of the vocabulary, such as "all_gather".
        unit: FQN of the unit; "" is the root.
        phase: "forward" or "backward".
    """

    op: str
    unit: str
    phase: str

    @property
    def name(self) -> str:
        """Its name in a profiler: "blocks.3 all_gather forward"."""
        return f"{self.unit or '(root)'} {self.op} {self.phase}"

    def __str__(self) -> str:
        return f"{self.phase:<8}  {self.op:<14}  {self.unit or '(root)'}"


def events_of(all_nodes: Iterable[fx.Node]) -> Iterator[tuple[Event, list[fx.Node]]]:
    """The events of `call_function` nodes in their order; see `Program.timeline`."""
    event: Event | None = None
    nodes: list[fx.Node] = []
    for node in all_nodes:
        if ops.is_unpack(node):
            continue
        if node.target is ops.release:
            if event is not None and event.op == COMPUTE:
                nodes.append(node)
            continue
        op = ops.op_of(node)
        name = COMPUTE if op is None else op.name
        current = Event(name, node.meta.get("unit", ""), node.meta["phase"])
        merges = op is None or op.in_runs
        if event is not None and (current != event or not merges):
            yield event, nodes
            nodes = []
        event = current
        nodes.append(node)
    if event is not None:
        yield event, nodes


@dataclass(frozen=True)
class ParamEntry:
    """A parameter of the program; a tied parameter is one entry with all its names."""

    fqn: str
    names: tuple[str, ...]  # all its FQNs, `fqn` first
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    node: fx.Node
    ignored: bool = False  # in no unit: whole on every rank, its gradient is not reduced

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class BufferEntry:
    """A buffer of the model, or (`constant`) a plain tensor that the model closes over."""

    fqn: str
    names: tuple[str, ...]
    node: fx.Node
    constant: bool = False
    value: torch.Tensor | None = field(default=None, compare=False)  # the tensor, for a constant


@dataclass(frozen=True)
class InputEntry:
    """A tensor that the caller passes; `path` names it as the user does, such as "args[0]"."""

    path: str
    node: fx.Node
    requires_grad: bool = False


@dataclass(frozen=True)
class OutputEntry:
    """A tensor that the model returns; `tangent` is the placeholder of its gradient, or None."""

    path: str
    tangent: fx.Node | None


@dataclass(frozen=True)
class MutationEntry:
    """A buffer or input that forward updates; `target` is its placeholder."""

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
    """A captured or rewritten step. Passes edit `graph` in place; the tables describe its ends."""

    graph: fx.Graph
    params: tuple[ParamEntry, ...]
    buffers: tuple[BufferEntry, ...]
    inputs: tuple[InputEntry, ...]
    outputs: tuple[OutputEntry, ...]
    mutations: tuple[MutationEntry, ...]
    training: bool
    grad: bool  # False: a forward-only program
    capture_device: str = "cpu"  # the device whose operators were traced
    device: str = "cpu"  # the device it runs on
    mesh_shape: tuple[int, ...] = (1,)  # (ranks,) or (replicas, ranks to shard over)
    # Resident parameters (SHARD_OPTIMIZER) whose rows on other ranks changed since the last gather:
    # they enter as shards and are gathered. Other resident parameters enter whole.
    stale: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())  # sentences for the reader of a dump
    sizes: Sizes | None = None  # symbolic sizes; None if all are numbers
    budget: Budget | None = None  # set if it is scheduled by cost
    cuda_graphs: CudaGraphs | None = None  # set by `CudaGraph`
    regions: Regions | None = None  # compiled regions, if any
    # The plan that it was rewritten by, without a program.
    plan: ShardingPlan | None = field(default=None, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.mesh_shape)

    @property
    def shard_size(self) -> int:
        """The number of ranks that a sharded parameter is split over."""
        return self.mesh_shape[-1]

    @property
    def assumed_sizes(self) -> dict[str, int]:
        """The value that estimates take for each size that depends on values, by its name."""
        return {} if self.sizes is None else self.sizes.assumed_by_values

    # -- ends ---------------------------------------------------------------------------------

    @property
    def output_node(self) -> fx.Node:
        """The graph's single output node."""
        return self.graph.output_node()

    def results(self) -> Results:
        """Copies of the output node's lists; write them back by `set_results`."""
        return Results(
            *(list(values) for values in cast("tuple[list[Any], ...]", self.output_node.args[0]))
        )

    def set_results(self, results: Results) -> None:
        """Replace the output node's lists."""
        self.output_node.args = results.as_args()

    def nodes(self, phase: str | None = None) -> Iterator[fx.Node]:
        """All `call_function` nodes in order, or those of one phase."""
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
        """Every event with its nodes.

        A communication node is an event of its own. Consecutive compute nodes of one unit form one
        event, and so do consecutive transfers of one op, and reshards. A release belongs to the
        compute before it. The nodes that pick results from a `wait` belong to no event.
        """
        return events_of(self.nodes())

    def schedule(self) -> list[Event]:
        """The program's events, in order."""
        return [event for event, _ in self.timeline()]

    def copy(self) -> Program:
        """An independent copy: a new graph, and tables that point into it."""
        graph, remap = _copied(self.graph)

        def remapped(node: fx.Node | None) -> fx.Node | None:
            return None if node is None else remap[node]

        return replace(
            self,
            graph=graph,
            params=tuple(replace(p, node=remap[p.node]) for p in self.params),
            buffers=tuple(replace(b, node=remap[b.node]) for b in self.buffers),
            inputs=tuple(replace(i, node=remap[i.node]) for i in self.inputs),
            outputs=tuple(replace(o, tangent=remapped(o.tangent)) for o in self.outputs),
            mutations=tuple(replace(m, target=remap[m.target]) for m in self.mutations),
        )

    def __str__(self) -> str:
        from graphshard.program.text import schedule_text

        return schedule_text(self)


def _copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of `graph`, and a map from each node to its copy; nodes share their values.

    `Graph.graph_copy` is slower: it copies `meta` twice, and copies nodes by `Graph.node_copy`.
    """
    copied = fx.Graph(tracer_cls=graph._tracer_cls)
    remap: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        remap[node] = copy_node(copied, node, remap)
    return copied, remap


def copy_node(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, Any]) -> fx.Node:
    """Append a copy of `node` to `graph`, with its operands replaced through the map `new`.

    `Graph.node_copy` takes twice as long, as it searches every argument for symbolic sizes.
    Setting the arguments afterwards avoids the search.
    """
    copied = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copied.args = fx.map_arg(node.args, new.__getitem__)
    if node.kwargs:
        copied.kwargs = fx.map_arg(node.kwargs, new.__getitem__)
    copied.meta.update(node.meta)
    return copied


_LEAVES = (fx.Node, Tensor, *SYMBOLIC)

_ATOMS = frozenset({int, bool, str, type(None), torch.dtype})
"""Types of most constants, told first: keys are made of every argument of every node."""


def argument_key(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """A hashable key of an argument, equal for arguments that are equal in structure.

    A constant goes with its type, as 1 and 1.0 differ, and a float by its text, as 0.0 and -0.0
    differ and NaN equals itself. `leaf` gives the key of a node, a tensor or a symbolic number.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, _LEAVES):
        return leaf(value)
    if isinstance(value, (list, tuple)):
        return tuple([argument_key(item, leaf) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, argument_key(value[key], leaf)) for key in sorted(value)])
    if isinstance(value, slice):
        return tuple([argument_key(end, leaf) for end in (value.start, value.stop, value.step)])
    return kind, repr(value) if isinstance(value, float) else value
