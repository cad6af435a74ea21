"""Cut a finished program into a forward graph and a backward graph.

The cut comes after every pass, so the program alone decides which values cross it: a forward value
is saved exactly if a backward node or a returned gradient reads it. A gathered parameter that stays
until backward crosses as the list that its `wait` returned, since its `free` needs the whole list;
backward picks the parameter from that list again.
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
from graphshard.program.regions import REGION, picks_from
from graphshard.program.size_nodes import symbol_nodes

GIVEN_BY = "given_by"
"""The key of a backward placeholder's `meta` for what gave its value, as text."""


@dataclass(frozen=True)
class Crossing:
    """A forward value that backward reads, by the name of its node.

    `tensor`: an activation, input or buffer, which autograd saves and checks. Otherwise a shard, a
    gathered parameter or part of one, or a number, which the runtime holds.
    """

    name: str
    tensor: bool


@dataclass(frozen=True)
class Cut:
    """The forward and backward graphs of a program, still with ops of the vocabulary.

    Attributes:
        forward: placeholders are parameters, buffers and constants, and inputs, in the order of
            the tables. Returns [outputs, mutations, crossing tensors, other crossing values].
        backward: placeholders are crossing tensors, other crossing values, and tangents. Returns
            [gradients of parameters, gradients of inputs]. None for a forward-only program.
        crossings: the values that cross, in the order forward computes them.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    crossings: tuple[Crossing, ...]


def cut(program: Program) -> Cut:
    """Cut `program`, which is not changed."""
    crossings = tuple(_crossings(program)) if program.grad else ()
    backward = cut_backward(program, crossings) if program.grad else None
    return Cut(_forward(program, crossings), backward, crossings)


def cut_backward(program: Program, crossings: Sequence[Crossing]) -> fx.Graph:
    """The backward graph of `program`, to run after a forward graph that saves `crossings`.

    `program` may be a specialised copy that no longer contains or reads some of them.
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
            placeholder.meta[GIVEN_BY] = f"{(picks_from(old) or old).target} in forward"
    for entry in program.outputs:
        if entry.tangent is not None:
            new[entry.tangent] = tangent = graph.node_copy(entry.tangent)
            tangent.meta[GIVEN_BY] = f"the call of backward, for output {entry.path},"
    for node in program.nodes():
        unpacks_crossing = ops.is_unpack(node) and node.args[0] in new and node not in new
        if not _runs_in_forward(node) or unpacks_crossing:
            new[node] = copy_node(graph, node, new)
    results = program.results()
    mapped = fx.map_arg([results.grads, results.input_grads], new.__getitem__)
    graph.output(mapped)
    for node in reversed(graph.nodes):
        if ops.is_unpack(node) and not node.users:
            graph.erase_node(node)
    return graph


def in_calling_order(crossings: Sequence[Crossing]) -> list[Crossing]:
    """Order `crossings` as backward's placeholders: tensors first, then the others."""
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
        from_backward = [source.name for source in node.all_input_nodes if source not in new]
        if from_backward:
            raise GraphshardError(
                f"forward node {node.name} reads backward's {', '.join(from_backward)}"
            )
        new[node] = copy_node(graph, node, new)
        by_name[node.name] = node
    overwritten = _overwritten(program)

    def returned(node: fx.Node) -> fx.Node:
        if node not in overwritten:
            return new[node]
        # The caller overwrites this storage with the new value after forward.
        copied = graph.call_function(torch.ops.aten.clone.default, (new[node],))
        copied.meta = {**node.meta, "phase": FORWARD}
        copied.meta.pop(REGION, None)
        return copied

    results = program.results()
    order = in_calling_order(crossings)
    tensors = [returned(by_name[c.name]) for c in order if c.tensor]
    others = [new[by_name[c.name]] for c in order if not c.tensor]
    outputs = fx.map_arg(results.outputs, returned)
    graph.output([outputs, fx.map_arg(results.mutations, new.__getitem__), tensors, others])
    return graph


def saved_nodes(program: Program) -> list[fx.Node]:
    """The forward nodes whose values backward reads, in the order of the graph."""
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
                used.add(_crossing_node(source))
    # A backward specialised later to outputs without gradients may need any size.
    used |= {node for node in symbol_nodes(program.nodes()).values() if _runs_in_forward(node)}
    return [node for node in program.graph.nodes if node in used]


def _crossings(program: Program) -> Iterator[Crossing]:
    """The forward values that backward reads, in the order forward computes them."""
    untracked = {entry.node for entry in program.params}
    untracked |= {entry.node for entry in program.buffers if entry.constant}
    untracked |= {node for node in program.nodes() if node.target is ops.reshard}
    for node in saved_nodes(program):
        is_tensor = isinstance(node.meta.get("val"), Tensor) and node not in untracked
        yield Crossing(node.name, is_tensor)


def _crossing_node(node: fx.Node) -> fx.Node:
    """The node that crosses in place of `node`: the `wait`, for a gathered parameter."""
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
    # A tuple cannot be saved, so its elements are picked in forward. Parameters are picked from a
    # gather that crosses in backward again (see `_crossing_node`).
    return node.target is operator.getitem and (
        isinstance(node.args[0], fx.Node)
        and not ops.is_unpack(node)
        and _runs_in_forward(node.args[0])
    )


def _overwritten(program: Program) -> set[fx.Node]:
    """Nodes whose storage a mutation overwrites right after forward."""
    overwritten = {entry.target for entry in program.mutations}
    for node in program.nodes():
        if any(source in overwritten for source in alias_inputs(node)):
            overwritten.add(node)
    return overwritten
