"""What compute costs in compiled regions: operators that are fused read and write memory once.

Matrix products, convolutions, attention and draws of random numbers stay kernels of their own. The
other operators of a region form one kernel between two such stages: those behind equally many of
them in a row. What such a kernel reads from elsewhere counts once, what is read outside of it once
more, and what stays inside counts nothing. The model knows nothing of what Inductor may decide
otherwise, such as to split a kernel at a reduction of another shape; a region that fell back to
single operators is counted as compiled.
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
"""The measured curve of a fused kernel: that of elementwise arithmetic."""


def fused_costs(program: Program) -> Mapping[fx.Node, OpCost]:
    """The cost of every node in a region of `program`; a kernel's stands at its last operator."""
    found: dict[fx.Node, OpCost] = {}
    if program.regions is not None:
        for region in regions_in(program.graph):
            found.update(_costs(region))
    return found


def _costs(region: Region) -> dict[fx.Node, OpCost]:
    inside = set(region.nodes)
    stage: dict[fx.Node, int] = {}
    kernels: dict[int, list[fx.Node]] = {}
    costs: dict[fx.Node, OpCost] = {}
    for node in region.nodes:
        read = [value for value in node.all_input_nodes if value in inside]
        behind = (stage[value] + _stands_alone(_maker(value)) for value in read)
        stage[node] = max(behind, default=0)
        costs[node] = FREE
        if _stands_alone(node):
            costs[node] = op_cost(node)
        elif _computes(node):
            kernels.setdefault(stage[node], []).append(node)
    for nodes in kernels.values():
        costs[nodes[-1]] = _kernel(nodes)
    return costs


def _kernel(nodes: list[fx.Node]) -> OpCost:
    """The cost of `nodes` as one kernel."""
    inside = set(nodes)
    reads: dict[fx.Node, int] = {}
    moved = 0
    for node in nodes:
        for value in node.all_input_nodes:
            owner = _owner(value)
            if _maker(owner) not in inside and isinstance(value.meta.get("val"), Tensor):
                size = node_bytes(value)
                reads[owner] = max(reads.get(owner, 0), min(size, node_bytes(owner)))
        for value in _values(node):
            if _read_outside(value, inside):
                moved += node_bytes(value)
    floats = [n.meta["val"].dtype for n in (*reads, *nodes) if isinstance(n.meta["val"], Tensor)]
    floats = [dtype for dtype in floats if dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    return OpCost("bandwidth", 0, moved + sum(reads.values()), dtype, _STREAMS)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view_op(node.target)


def _stands_alone(node: fx.Node) -> bool:
    """Whether a node is a kernel of its own in a region, too."""
    return node.op == "call_function" and (ops.is_random(node) or op_cost(node).flops > 0)


def _maker(value: fx.Node) -> fx.Node:
    """The operator whose result `value` is."""
    return picks_from(value) or value


def _owner(value: fx.Node) -> fx.Node:
    """The value that a view is of."""
    while (base := viewed(value)) is not None:
        value = base
    return value


def _values(node: fx.Node) -> list[fx.Node]:
    """The tensors that `node` gives."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if isinstance(user.meta.get("val"), Tensor)]


def _read_outside(value: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether anything but the kernel reads `value`, or a view of it."""
    for user in value.users:
        looks = picks_from(user) is value or viewed(user) is value
        if _read_outside(user, inside) if looks else user not in inside:
            return True
    return False
