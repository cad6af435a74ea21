"""The cost of compute in compiled regions, where a fused kernel reads and writes memory once.

Matrix products, convolutions, attention and random draws stay separate kernels. All other operators
of a region that have the same number of separate kernels before them form one fused kernel. Its
cost is the bytes it reads from outside and the bytes that are read outside of it. See README.md for
the limits of this model.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace

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


def fused_costs(program: Program, leave_eager: Collection[str] = ()) -> Mapping[fx.Node, OpCost]:
    """The cost of each node in a region of `program`; a kernel's cost is at its last operator.

    What `leave_eager` names is left out; see `is_left_eager`.
    """
    costs: dict[fx.Node, OpCost] = {}
    for region in compiled_regions(program, leave_eager):
        for node in region.nodes:
            costs[node] = op_cost(node) if is_separate(node) else FREE
        for nodes in kernels_of(region):
            costs[nodes[-1]] = _kernel(nodes)
    return costs


def compiled_regions(program: Program, leave_eager: Collection[str] = ()) -> list[Region]:
    """The regions of `program`, without the nodes that `leave_eager` names."""
    if program.regions is None:
        return []
    regions = []
    for region in regions_in(program.graph):
        nodes = tuple(n for n in region.nodes if not is_left_eager(n, leave_eager))
        if nodes:
            regions.append(replace(region, nodes=nodes))
    return regions


def is_left_eager(node: fx.Node, names: Collection[str]) -> bool:
    """Whether `node` belongs to a unit among `names`, or lies in a module among them."""
    if node.meta.get("unit", "") in names:
        return True
    fqn = str(node.meta.get("fqn", ""))
    return any(fqn == name or fqn.startswith(f"{name}.") for name in names if name)


def kernels_of(region: Region) -> list[list[fx.Node]]:
    """The operators of each fused kernel of `region`."""
    inside = set(region.nodes)
    stage: dict[fx.Node, int] = {}
    kernels: dict[int, list[fx.Node]] = {}
    for node in region.nodes:
        read = [value for value in node.all_input_nodes if value in inside]
        behind = (stage[value] + is_separate(operator_of(value)) for value in read)
        stage[node] = max(behind, default=0)
        computes = node.target is not operator.getitem and not is_view_op(node.target)
        if computes and not is_separate(node):
            kernels.setdefault(stage[node], []).append(node)
    return list(kernels.values())


def _kernel(nodes: list[fx.Node]) -> OpCost:
    """The cost of `nodes` as one fused kernel."""
    inside = set(nodes)
    reads: dict[fx.Node, int] = {}
    moved = 0
    for node in nodes:
        for value in node.all_input_nodes:
            base = base_of(value)
            if operator_of(base) not in inside and isinstance(value.meta.get("val"), Tensor):
                size = node_bytes(value)
                reads[base] = max(reads.get(base, 0), min(size, node_bytes(base)))
        for value in results_of(node):
            if read_outside(value, inside):
                moved += node_bytes(value)
    floats = [n.meta["val"].dtype for n in (*reads, *nodes) if isinstance(n.meta["val"], Tensor)]
    floats = [dtype for dtype in floats if dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    return OpCost("bandwidth", 0, moved + sum(reads.values()), dtype, _STREAMS)


def is_separate(node: fx.Node) -> bool:
    """Whether `node` stays a separate kernel in a region."""
    return node.op == "call_function" and (ops.is_random(node) or op_cost(node).flops > 0)


def operator_of(value: fx.Node) -> fx.Node:
    """The operator that returns `value`."""
    return picks_from(value) or value


def base_of(value: fx.Node) -> fx.Node:
    """The value that `value` is a view of, or itself."""
    while (base := viewed(value)) is not None:
        value = base
    return value


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes of the tensors that `node` returns."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if isinstance(user.meta.get("val"), Tensor)]


def read_outside(value: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node outside the kernel reads `value` or a view of it."""
    for user in value.users:
        aliases = picks_from(user) is value or viewed(user) is value
        if read_outside(user, inside) if aliases else user not in inside:
            return True
    return False
