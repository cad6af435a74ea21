"""Cutting a finished program into what runs in forward and what runs in backward.

The cut comes after every pass, so what crosses it is read off the program and decided by nobody:
a forward value is kept for backward exactly if a backward node (or a gradient) uses it. A gathered
parameter kept over the border crosses as the list its `wait` returned, since its `free` needs the
whole list, and is unpacked again on the other side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphshard.errors import GraphshardError
from graphshard.program import ops
from graphshard.program.aliases import alias_inputs
from graphshard.program.program import BACKWARD, FORWARD, Program, copy_node
from graphshard.program.regions import REGION
from graphshard.program.size_nodes import symbol_nodes


@dataclass(frozen=True)
class Crossing:
    """A forward value that backward uses.

    tensor: an activation, input or buffer, which autograd keeps and checks; otherwise a shard, a
    gathered parameter or a part of one, or a plain number, which the runtime keeps as it is.
    """

    name: str
    tensor: bool


@dataclass(frozen=True)
class Cut:
    """The two halves of a program, still in the graph vocabulary.

    forward   placeholders: parameters, buffers and constants, inputs, in table order;
              output: [outputs, mutations, tensors that cross, others that cross]
    backward  placeholders: tensors that cross, others that cross, tangents, in order;
              output: [gradients of parameters, gradients of inputs]; None if forward-only
    """

    forward: fx.Graph
    backward: fx.Graph | None
    crossings: tuple[Crossing, ...]


def cut(program: Program) -> Cut:
    """Split `program`, which stays as it is.

    Raises:
        GraphshardError: a forward node reads what only backward computes.
    """
    crossings = tuple(_crossings(program)) if program.grad else ()
    backward = cut_backward(program, crossings) if program.grad else None
    return Cut(_forward(program, crossings), backward, crossings)


def cut_backward(program: Program, crossings: Sequence[Crossing]) -> fx.Graph:
    """The backward half of `program`, to run after a forward that saves `crossings`.

    `program` may be a specialised copy that no longer has or uses some of them.
    """
    by_name = {node.name: node for node in program.graph.nodes}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for crossing in in_calling_order(crossings):
        placeholder = graph.placeholder(crossing.name)
        old = by_name.get(crossing.name)
        placeholder.meta = {**(old.meta if old is not None else {}), "phase": BACKWARD}
        if old is not None:
            new[old] = placeholder
    for entry in program.outputs:
        if entry.tangent is not None:
            new[entry.tangent] = graph.node_copy(entry.tangent)
    for node in program.nodes():
        kept_unpack = ops.is_unpack(node) and node.args[0] in new and node not in new
        if not _runs_in_forward(node) or kept_unpack:
            new[node] = copy_node(graph, node, new)
    results = program.results()
    mapped = fx.map_arg([results.grads, results.input_grads], new.__getitem__)
    graph.output(mapped)
    return _without_unused_unpacks(graph)


def in_calling_order(crossings: Sequence[Crossing]) -> list[Crossing]:
    """Tensors first, then the others: the order of backward's placeholders."""
    return [c for c in crossings if c.tensor] + [c for c in crossings if not c.tensor]


def _forward(program: Program, crossings: Sequence[Crossing]) -> fx.Graph:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    ends = [p.node for p in program.params] + [b.node for b in program.buffers]
    ends += [i.node for i in program.inputs]
    for node in (*ends, *program.nodes()):
        if not _runs_in_forward(node):
            continue
        late = [source.name for source in node.all_input_nodes if source not in new]
        if late:
            raise GraphshardError(f"forward node {node.name} reads backward's {', '.join(late)}")
        new[node] = copy_node(graph, node, new)
        by_name[node.name] = node
    overwritten = _overwritten(program)

    def leaving(node: fx.Node) -> fx.Node:
        if node not in overwritten:
            return new[node]
        # The caller writes the new value over this storage once forward has returned.
        copied = graph.call_function(torch.ops.aten.clone.default, (new[node],))
        copied.meta = {**node.meta, "phase": FORWARD}
        copied.meta.pop(REGION, None)
        return copied

    results = program.results()
    order = in_calling_order(crossings)
    tensors = [leaving(by_name[c.name]) for c in order if c.tensor]
    others = [new[by_name[c.name]] for c in order if not c.tensor]
    outputs = fx.map_arg(results.outputs, leaving)
    graph.output([outputs, fx.map_arg(results.mutations, new.__getitem__), tensors, others])
    return graph


def saved_nodes(program: Program) -> list[fx.Node]:
    """What backward uses of forward, in the order of the graph."""
    used: set[fx.Node] = set()
    for node in (*program.nodes(BACKWARD), program.output_node):
        if node.op == "output":
            results = program.results()
            sources = [n for n in (*results.grads, *results.input_grads) if isinstance(n, fx.Node)]
        elif _runs_in_forward(node):
            continue
        else:
            sources = node.all_input_nodes
        for source in sources:
            if _runs_in_forward(source):
                used.add(_kept_as(source))
    # A backward derived later, for outputs without a gradient, may need any size.
    used |= {node for node in symbol_nodes(program).values() if _runs_in_forward(node)}
    return [node for node in program.graph.nodes if node in used]


def _crossings(program: Program) -> Iterator[Crossing]:
    """What backward uses of forward, in the order forward computes it."""
    kept_whole = {entry.node for entry in program.params}
    kept_whole |= {entry.node for entry in program.buffers if entry.constant}
    kept_whole |= {node for node in program.nodes() if node.target is ops.reshard}
    for node in saved_nodes(program):
        is_tensor = isinstance(node.meta.get("val"), Tensor) and node not in kept_whole
        yield Crossing(node.name, is_tensor)


def _kept_as(node: fx.Node) -> fx.Node:
    """The node that crosses so that backward has `node`: for a gathered parameter, its `wait`."""
    if ops.is_unpack(node) and ops.collective_of(node).target is ops.all_gather:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def _runs_in_forward(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return node.meta["phase"] == FORWARD
    if node.meta["phase"] == FORWARD:
        return True
    # A tuple cannot be saved, so its elements are picked where it is computed. What is picked from
    # a kept gather is picked again in backward (see `_kept_as`).
    return node.target is operator.getitem and (
        isinstance(node.args[0], fx.Node)
        and not ops.is_unpack(node)
        and _runs_in_forward(node.args[0])
    )


def _overwritten(program: Program) -> set[fx.Node]:
    """Values whose storage a mutation overwrites right after forward."""
    found = {entry.target for entry in program.mutations}
    for node in program.nodes():
        if any(source in found for source in alias_inputs(node)):
            found.add(node)
    return found


def _without_unused_unpacks(graph: fx.Graph) -> fx.Graph:
    for node in reversed(graph.nodes):
        if ops.is_unpack(node) and not node.users:
            graph.erase_node(node)
    return graph
