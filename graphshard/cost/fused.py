"""The cost of compute in compiled regions, where a fused kernel reads and writes memory once.

Matrix products, convolutions, attention and random draws stay separate kernels. All other operators
of a region that have the same number of separate kernels before them form one fused kernel. Its
cost is the bytes it reads from outside and the bytes that are read outside of it. See README.md for
the limits of this model.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from graphshard.cost.op_cost import FREE, OpCost, op_cost
from graphshard.program import ops
from graphshard.program.aliases import is_view_op
from graphshard.program.program import Program
from graphshard.program.regions import Region, picks_from, regions_in, viewed
from graphshard.program.storages import node_bytes

_STREAMS = ("add",)
"""The measured curve of a fused kernel, which is that of elementwise arithmetic."""


def fused_costs(program: Program) -> Mapping[fx.Node, OpCost]:
    """The cost of each node in a region of `program`; a kernel's cost is at its last operator."""
    costs: dict[fx.Node, OpCost] = {}
    if program.regions is not None:
        for region in regions_in(program.graph):
            costs.update(_costs(region))
    return costs


def _costs(region: Region) -> dict[fx.Node, OpCost]:
    inside = set(region.nodes)
    stage: dict[fx.Node, int] = {}
    kernels: dict[int, list[fx.Node]] = {}
    costs: dict[fx.Node, OpCost] = {}
    for node in region.nodes:
        read = [value for value in node.all_input_nodes if value in inside]
        behind = (stage[value] + _is_separate(_operator_of(value)) for value in read)
        stage[node] = max(behind, default=0)
        costs[node] = FREE
        if _is_separate(node):
            costs[node] = op_cost(node)
        elif _computes(node):
            kernels.setdefault(stage[node], []).append(node)
    for nodes in kernels.values():
        costs[nodes[-1]] = _kernel(nodes)
    return costs


def _kernel(nodes: list[fx.Node]) -> OpCost:
    """The cost of `nodes` as one fused kernel."""
    inside = set(nodes)
    reads: dict[fx.Node, int] = {}
    moved = 0
    for node in nodes:
        for value in node.all_input_nodes:
            base = _base(value)
            if _operator_of(base) not in inside and isinstance(value.meta.get("val"), Tensor):
                size = node_bytes(value)
                reads[base] = max(reads.get(base, 0), min(size, node_bytes(base)))
        for value in _results(node):
            if _read_outside(value, inside):
                moved += node_bytes(value)
    floats = [n.meta["val"].dtype for n in (*reads, *nodes) if isinstance(n.meta["val"], Tensor)]
    floats = [dtype for dtype in floats if dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    return OpCost("bandwidth", 0, moved + sum(reads.values()), dtype, _STREAMS)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view_op(node.target)


def _is_separate(node: fx.Node) -> bool:
    """Whether `node` stays a separate kernel in a region."""
    return node.op == "call_function" and (ops.is_random(node) or op_cost(node).flops > 0)


def _operator_of(value: fx.Node) -> fx.Node:
    """The operator that returns `value`."""
    return picks_from(value) or value


def _base(value: fx.Node) -> fx.Node:
    """The value that `value` is a view of, or itself."""
    while (base := viewed(value)) is not None:
        value = base
    return value


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes of the tensors that `node` returns."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if isinstance(user.meta.get("val"), Tensor)]


def _read_outside(value: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node outside the kernel reads `value` or a view of it."""
    for user in value.users:
        aliases = picks_from(user) is value or viewed(user) is value
        if _read_outside(user, inside) if aliases else user not in inside:
            return True
    return False
