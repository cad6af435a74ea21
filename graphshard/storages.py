"""Which values of forward share one storage, and what of them backward uses."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphshard import ops
from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.runtime.cut import crossing_nodes
from graphshard.sizes import is_contiguous
from graphshard.views import alias_inputs, derived_values


@dataclass(frozen=True)
class Saved:
    """A storage that forward computes and backward reads.

    root: the value that owns it. values: what backward reads of it, in order of the graph; the
    root itself, or views of it.
    """

    root: fx.Node
    values: tuple[fx.Node, ...]


def saved_storages(program: Program, plan: ShardingPlan) -> list[Saved]:
    """What forward computes on the device and backward reads, by storage.

    Not parameters, shards and what is gathered from them, kept or derived of that, not buffers and
    inputs (which live anyway), no numbers, and nothing that lies on the host.
    """
    parameters = derived_values(program, plan)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in crossing_nodes(program):
        if not isinstance(node.meta.get("val"), Tensor) or node in parameters:
            continue
        root = storage_root(node)
        if root.op == "placeholder" or ops.is_unpack(root) or ops.is_transfer(root):
            continue
        if root.target is ops.reshard:
            continue
        if node.meta["val"].device.type != torch.device(program.capture_device).type:
            continue
        found.setdefault(root, []).append(node)
    return [Saved(root, tuple(values)) for root, values in found.items()]


def storage_root(node: fx.Node) -> fx.Node:
    """The value whose storage `node` has a view of; `node` itself, if it has its own."""
    while bases := alias_inputs(node):
        base = bases[0]
        if node.target is operator.getitem and not ops.is_unpack(node) and not alias_inputs(base):
            return node  # one of several results of its own
        if base.target is ops.wait:
            return node
        node = base
    return node


def aliases_of(root: fx.Node) -> list[fx.Node]:
    """`root` and every value that shares its storage, in order of the graph."""
    found = {root: None}
    stack = [root]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in found and node in alias_inputs(user):
                found[user] = None
                stack.append(user)
    return sorted(found)


def is_dense(value: fx.Node) -> bool:
    """Whether a value has no gaps and no overlaps, in whatever order its elements lie."""
    val: Tensor = value.meta["val"]
    expected: object = 1
    pairs = [(stride, size) for stride, size in zip(val.stride(), val.shape, strict=True)]
    if any(type(number) is not int for pair in pairs for number in pair):
        return is_contiguous(val)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected = stride * size
    return True
