"""Values that share a parameter's storage, and values that are cheap to derive from it.

Two relations, both read off a graph in one walk:

    alias      a view that shares storage with its input; not used after the storage is freed.
    derived    a view, a cast or a plain copy of one parameter; cheap to compute again from a newly
               gathered parameter, and as large to save as the parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective, params_of
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.sizes import is_contiguous, size_text
from graphshard.torch_private.compat import SYMBOLIC

aten = torch.ops.aten


# Operators that return a view of their input although their schema declares no alias.
_UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default})


# Operators that return the elements of their input in another dtype or order.
COPYING_OPS = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@cache
def is_view_op(target: Any) -> bool:
    """Whether `target` returns a view of its first argument."""
    if target in _UNDECLARED_VIEWS:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(ret.alias_info is not None for ret in schema.returns)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of `node` that are not numbers (sizes may be nodes too)."""
    return [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), _NUMBERS)]


_NUMBERS = (int, float, bool, *SYMBOLIC)


def nbytes(value: fx.Node) -> int | None:
    """Bytes of the elements of `value`, a tensor; None if a size is symbolic."""
    val: torch.Tensor = value.meta["val"]
    count = 1
    for size in val.shape:
        if type(size) is not int:
            return None
        count *= size
    return count * val.dtype.itemsize


def bytes_text(values: Iterable[fx.Node]) -> str:
    """Bytes of all elements of `values` as text, e.g. "1,024", or "96*batch" if symbolic."""
    total: Any = 0
    for value in values:
        size: Any = value.meta["val"].dtype.itemsize
        for length in value.meta["val"].shape:
            size = size * length
        total = total + size
    return f"{total:,}" if isinstance(total, int) else size_text(total)


def alias_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose storage the value of `node` may share; empty for most nodes."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        source = node.args[0]
        # A selected result is an alias exactly if the result of the operator is one, which a walk
        # over aliases has found before.
        return [source] if isinstance(source, fx.Node) else []
    if not is_view_op(node.target):
        return []
    # Every view operator of ATen views its first argument.
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    return [first] if isinstance(first, fx.Node) else []


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype to which `node` casts its first argument; None if it does more than a cast."""
    if node.op != "call_function" or not node.args:
        return None
    kwargs = dict(node.kwargs)
    dtype = kwargs.pop("dtype", None)
    if node.target is ops.cast:
        return dtype  # type: ignore[return-value]
    if node.target is torch.ops.prims.convert_element_type.default:
        return node.args[1]  # type: ignore[return-value]
    source = node.args[0]
    if node.target is not aten._to_copy.default or not isinstance(source, fx.Node):
        return None
    val = source.meta["val"]  # autograd's casts also name attributes that do not change
    same = {"device": (None, val.device), "layout": (None, val.layout), "pin_memory": (None, False)}
    stays = all(name in same and value in same[name] for name, value in kwargs.items())
    return dtype if stays else None  # type: ignore[return-value]


def transfers_into(collective: fx.Node) -> list[fx.Node]:
    """The transfers that bring the operands of `collective` to it, in order of the graph."""
    stack: list[fx.Node] = list(collective.args[0])  # type: ignore[arg-type]
    transfers: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if ops.is_transfer(node) and node not in transfers:
            transfers.add(node)
            stack += node.all_input_nodes
    return sorted(transfers)


def transfers_after(node: fx.Node) -> list[fx.Node]:
    """The chain of transfers that starts at `node`, with the nodes that accumulate its result."""

    def followed(user: fx.Node) -> bool:
        return ops.is_transfer(user) or user.target is ops.accumulate_grad

    transfers = list(filter(followed, node.users))
    for transfer in transfers:  # the list grows during the loop
        transfers += filter(followed, transfer.users)
    return transfers


def _is_derivation(node: fx.Node) -> bool:
    if not _may_derive(node.target) or len(tensor_inputs(node)) != 1:
        return False
    return node.target not in COPYING_OPS or all(user.op != "output" for user in node.users)


@cache
def _may_derive(target: Any) -> bool:
    return target in COPYING_OPS or target is operator.getitem or is_view_op(target)


@dataclass(frozen=True)
class ParameterSource:
    """The source of a full value of a parameter.

    node: a placeholder, or a tensor selected from a gather. param, unit: FQNs. base: the value that
    a derived value is computed from; None for `node` itself.
    """

    node: fx.Node
    param: str
    unit: str
    base: fx.Node | None = None


def gather_waits(program: Program) -> Iterator[fx.Node]:
    """Every `wait` on an all_gather, in order of the graph."""
    for node in program.nodes():
        if node.target is ops.wait and ops.collective_of(node).target is ops.all_gather:
            yield node


def unpacks(wait: fx.Node) -> list[fx.Node]:
    """The nodes that select tensors from `wait`, by operand index."""
    selections = [user for user in wait.users if ops.is_unpack(user)]
    return sorted(selections, key=lambda node: node.args[1])  # type: ignore[arg-type,return-value]


def releases_of(gather: fx.Node) -> list[fx.Node]:
    """The nodes that release parameters of an all_gather, in order of the graph."""
    waits = [wait for wait in gather.users if wait.target is ops.wait]
    params = [param for wait in waits for param in unpacks(wait)]
    return sorted(user for param in params for user in param.users if user.target is ops.release)


def derived_values(program: Program, plan: ShardingPlan) -> dict[fx.Node, ParameterSource]:
    """The source of every full value of a sharded parameter and of every value derived from one.

    A placeholder is a source only while it is the full parameter, until a gather of it is inserted.
    A cast or copy that the step returns is an ordinary use, as it has to outlive the parameter.
    """
    sources: dict[fx.Node, ParameterSource] = {}
    for param in program.params:
        if plan.layouts[param.fqn].enters_as_shard(program.stale) and not any(
            ops.is_collective(user) or ops.is_transfer(user) for user in param.node.users
        ):
            sources[param.node] = ParameterSource(
                param.node, param.fqn, plan.unit_of_param(param.fqn)
            )
    for node in program.nodes():
        if ops.is_unpack(node):
            gather = ops.collective_of(node)
            if gather.target is ops.all_gather:
                index = node.args[1]
                assert isinstance(index, int)
                param_fqn = params_of(gather)[index]
                sources[node] = ParameterSource(node, param_fqn, plan.unit_of_param(param_fqn))
        elif sources.keys().isdisjoint(node.all_input_nodes):
            continue
        elif ops.is_compute(node) and _is_derivation(node):
            base = tensor_inputs(node)[0]
            if base in sources:
                sources[node] = replace(sources[base], base=base)
    return sources


def storage_root(node: fx.Node) -> fx.Node:
    """The value that allocates the storage of `node`; itself unless it is a view."""
    while bases := alias_inputs(node):
        base = bases[0]
        if node.target is operator.getitem and not ops.is_unpack(node) and not alias_inputs(base):
            return node  # one of several results of an operator
        if base.target is ops.wait:
            return node
        node = base
    return node


def aliases_of(*roots: fx.Node) -> list[fx.Node]:
    """`roots` and every value that shares a storage with one of them, in order of the graph."""
    aliases = set(roots)
    stack = list(roots)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in aliases and node in alias_inputs(user):
                aliases.add(user)
                stack.append(user)
    return sorted(aliases)


def uses_of(*roots: fx.Node) -> list[fx.Node]:
    """Every node that the storages of `roots` must outlive.

    These are the aliases of `roots` and the nodes that read one of them. If such a node is a
    collective or a copy between device and host, so is the `wait` or `arrive` that ends it. The
    program's output is not included.
    """
    uses = dict.fromkeys(aliases_of(*roots))
    for value in list(uses):
        for user in value.users:
            if user.op == "call_function":
                uses[user] = None
                uses.update((end, None) for end in user.users if end.target in _ENDS)
    return list(uses)


_ENDS = (ops.wait, ops.arrive)


def is_dense(value: fx.Node) -> bool:
    """Whether the elements of `value` have no gaps and no overlaps in memory, in any order."""
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


def shared_outputs(program: Program) -> list[int]:
    """Indices of differentiable outputs that are arguments of the program, or earlier outputs."""
    seen: set[Any] = {p.node for p in program.params} | {b.node for b in program.buffers}
    seen |= {i.node for i in program.inputs}
    shared = []
    for index, value in enumerate(program.results().outputs):
        if value in seen and program.outputs[index].tangent is not None:
            shared.append(index)
        seen.add(value)
    return shared


def gathered_in_forward(program: Program) -> set[str]:
    """The parameters whose rows have all arrived once forward is done."""
    by_phase: dict[str, set[str]] = {FORWARD: set(), BACKWARD: set()}
    for wait in gather_waits(program):
        by_phase[wait.meta["phase"]].update(params_of(ops.collective_of(wait)))
    return by_phase[FORWARD] - by_phase[BACKWARD]  # those of one gathered in pieces may differ


def read_in_backward(program: Program, saved: Collection[str]) -> set[str]:
    """The parameters whose storage backward reads, so that a change after forward would show.

    These are inputs of the program that backward uses (shards to gather again, resident
    parameters), and resident parameters that were gathered in place. It may use a view alone.
    `saved` are the names of the nodes that are saved for backward.
    """
    storages = {param.fqn: [param.node] for param in program.params}
    for wait in gather_waits(program):
        gather = ops.collective_of(wait)
        if Collective.of(gather).in_place:
            for full in unpacks(wait):
                index: Any = full.args[1]
                storages[params_of(gather)[index]].append(full)
    return {
        fqn
        for fqn, nodes in storages.items()
        if any(node.name in saved for node in aliases_of(*nodes))
    }
