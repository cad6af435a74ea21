"""Which values share a parameter's storage, and which can be had again from it for little.

Two relations, both read off a graph in one walk:

    alias      shares storage with its input: a view. Must not be used after the storage is freed.
    derived    a view, a cast or a plain copy of one parameter: cheap to compute again from a newly
               gathered parameter, and as large as the parameter to keep.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import params_of
from graphshard.program.program import Program
from graphshard.program.sizes import is_contiguous, size_text
from graphshard.torch_private.compat import SYMBOLIC

aten = torch.ops.aten


# Returns a view of its input although its schema says nothing of an alias.
_UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default})


# Not views, but no more than the parameter's own elements in another dtype or order.
COPIES = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@cache
def is_view_op(target: Any) -> bool:
    """Whether calling `target` gives a view of its first argument."""
    if target in _UNDECLARED_VIEWS:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(ret.alias_info is not None for ret in schema.returns)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of `node` that are not plain numbers (sizes may be nodes too)."""
    return [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), _NUMBERS)]


_NUMBERS = (int, float, bool, *SYMBOLIC)


def nbytes(value: fx.Node) -> int | None:
    """Bytes of a value's own elements; None if a size is symbolic."""
    val: torch.Tensor = value.meta["val"]
    count = 1
    for size in val.shape:
        if type(size) is not int:
            return None
        count *= size
    return count * val.dtype.itemsize


def bytes_text(values: Iterable[fx.Node]) -> str:
    """Bytes of the elements of `values` together, e.g. "1,024"; "96*batch" if symbolic."""
    total: Any = 0
    for value in values:
        size: Any = value.meta["val"].dtype.itemsize
        for length in value.meta["val"].shape:
            size = size * length
        total = total + size
    return f"{total:,}" if isinstance(total, int) else size_text(total)


def alias_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose storage the value of `node` may share (empty for most nodes)."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        source = node.args[0]
        # Picking from a multi-output op yields that op's own tensor; it is an alias exactly when
        # the op's result is, which the walk over aliases already knows.
        return [source] if isinstance(source, fx.Node) else []
    if not is_view_op(node.target):
        return []
    # Every aten view op views its first argument.
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    return [first] if isinstance(first, fx.Node) else []


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype `node` casts its first argument to, if that is all it does."""
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
    val = source.meta["val"]  # autograd's casts say what stays as well
    same = {"device": (None, val.device), "layout": (None, val.layout), "pin_memory": (None, False)}
    stays = all(name in same and value in same[name] for name, value in kwargs.items())
    return dtype if stays else None  # type: ignore[return-value]


def transfers_into(collective: fx.Node) -> list[fx.Node]:
    """The transfers between where the operands of `collective` come from and it, in graph order."""
    stack: list[fx.Node] = list(collective.args[0])  # type: ignore[arg-type]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if ops.is_transfer(node) and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return sorted(found)


def transfers_after(node: fx.Node) -> list[fx.Node]:
    """The transfers that take `node` further, those that take them further, and what keeps them."""

    def followed(user: fx.Node) -> bool:
        return ops.is_transfer(user) or user.target is ops.accumulate_grad

    found = list(filter(followed, node.users))
    for each in found:  # grows while it is walked
        found += filter(followed, each.users)
    return found


def _is_derivation(node: fx.Node) -> bool:
    if not _may_derive(node.target) or len(tensor_inputs(node)) != 1:
        return False
    return node.target not in COPIES or all(user.op != "output" for user in node.users)


@cache
def _may_derive(target: Any) -> bool:
    return target in COPIES or target is operator.getitem or is_view_op(target)


@dataclass(frozen=True)
class Source:
    """Where a parameter's value comes from."""

    node: fx.Node  # a placeholder, or a tensor out of a gather
    param: str
    unit: str
    base: fx.Node | None = None  # what a derived value was made from, None for `node` itself


def gather_waits(program: Program) -> Iterator[fx.Node]:
    """Every `wait` on an all_gather, in order."""
    for node in program.nodes():
        if node.target is ops.wait and ops.collective_of(node).target is ops.all_gather:
            yield node


def unpacks(wait: fx.Node) -> list[fx.Node]:
    """The nodes that pick tensors out of `wait`, by operand index."""
    picked = [user for user in wait.users if ops.is_unpack(user)]
    return sorted(picked, key=lambda node: node.args[1])  # type: ignore[arg-type,return-value]


def releases_of(gather: fx.Node) -> list[fx.Node]:
    """The nodes that release parameters of an all_gather, in order of the graph."""
    picked = [one for wait in gather.users if wait.target is ops.wait for one in unpacks(wait)]
    return sorted(user for one in picked for user in one.users if user.target is ops.release)


def derived_values(program: Program, plan: ShardingPlan) -> dict[fx.Node, Source]:
    """Every full value of a sharded parameter and every value derived from one, with its source.

    A placeholder is a source only while it still stands for the full parameter, that is until
    something gathers it. A cast or copy that the step returns is not derived but a use like any
    other: it has to outlive the parameter.
    """
    found: dict[fx.Node, Source] = {}
    for param in program.params:
        if plan.layouts[param.fqn].enters_as_shard(program.stale) and not any(
            ops.is_collective(user) or ops.is_transfer(user) for user in param.node.users
        ):
            found[param.node] = Source(param.node, param.fqn, plan.unit_of_param(param.fqn))
    for node in program.nodes():
        if ops.is_unpack(node):
            gather = ops.collective_of(node)
            if gather.target is ops.all_gather:
                index = node.args[1]
                assert isinstance(index, int)
                param_fqn = params_of(gather)[index]
                found[node] = Source(node, param_fqn, plan.unit_of_param(param_fqn))
        elif ops.is_compute(node) and _is_derivation(node):
            base = tensor_inputs(node)[0]
            if base in found:
                found[node] = replace(found[base], base=base)
    return found


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

    These are the aliases of `roots`, the nodes that read one of them, and, for a collective or a
    copy between device and host that does, the `wait` or `arrive` that ends it. The program's
    output is not among them.
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
