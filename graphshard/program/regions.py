"""Regions: the stretches of a program's compute that are compiled, each as one function.

A region holds compute nodes of one unit and one phase that stand next to each other: of the
vocabulary nothing but releases stands among them, so compiling them moves nothing across a
collective, a wait, a free or a transfer. Its number is in the nodes' `meta["region"]`. Two regions
have one form if they are equal in structure: operators, constants, shapes, strides, dtypes,
devices, and what of it is read outside. A form is compiled once, whatever the depth of the model.

Three kinds of nodes among those of a region do not belong to it, as they need nothing it computes:
sizes, what is picked from a `wait` or from an operator left outside, and nodes that run elsewhere.

A `release` among them is the region's, and is not compiled. Nobody but the region's operands then
holds the parameter any more, and compiled code drops each operand behind its last use, as the
operators one by one do: so memory goes back there, in whatever order a compiler puts them. Where a
parameter is released makes no difference to a form.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphshard.program import ops
from graphshard.program.aliases import alias_inputs, is_view_op
from graphshard.program.annotations import Regions
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import SYMBOLIC

REGION = "region"
"""The key of `node.meta` that holds a region's number."""


_aten = torch.ops.aten


# Torch's own fake kernel of the first takes bfloat16 alone; the second reads a storage by offsets.
_LEFT_OUT = frozenset({_aten._grouped_mm, _aten.as_strided})


_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Region:
    """One region of a graph.

    inputs: what it reads, the sizes first: every symbol of a size in it is among them, numbers that
    are the same in every call are not. outputs: what of it is read outside, those left out too.
    releases: those that stand among its nodes.
    """

    number: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    releases: tuple[fx.Node, ...]


# -- what may be in a region ----------------------------------------------------------------------


def works(node: fx.Node) -> bool:
    """Whether `node` is an operator that does more than look at what there is."""
    return ops.is_compute(node) and not (
        node.target is operator.getitem or is_view_op(node.target) or not _is_operator(node)
    )


def may_join(node: fx.Node) -> bool:
    """Whether `node` may be compiled: it writes nowhere, and gives tensors of known sizes."""
    if not ops.is_compute(node) or not _is_operator(node) or ops.writes(node):
        return False
    target: Any = node.target
    if target.overloadpacket in _LEFT_OUT or any(tag in target.tags for tag in _BY_DATA):
        return False
    if not all(_is_operand(value.meta.get("val")) for value in node.all_input_nodes):
        return False
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return all(
            user.target is operator.getitem
            and (_is_plain(part := user.meta.get("val")) or is_fixed(part) or not user.users)
            for user in node.users
        )
    return _is_plain(val)


def picks_from(node: fx.Node) -> fx.Node | None:
    """The node whose results `node` picks one of, if it does that."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """The value that `node` is a view of, or one of several views; None if it is a value's own."""
    source = picks_from(node) or node
    bases = alias_inputs(source) if is_view_op(source.target) else []
    return bases[0] if bases else None


def _is_operator(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _is_plain(val: Any) -> bool:
    """A tensor of the usual kind."""
    return isinstance(val, Tensor) and val.layout is torch.strided and not val.is_quantized


def is_fixed(val: Any) -> bool:
    """A value that is the same in every call: a plain number, or None."""
    return val is None or type(val) in (int, float, bool)


def _is_operand(val: Any) -> bool:
    return _is_plain(val) or is_fixed(val) or isinstance(val, torch.SymInt)


# -- reading regions off a graph ------------------------------------------------------------------


def regions_in(graph: fx.Graph) -> list[Region]:
    """The regions of a graph, a whole program's or that of one half of it, in order.

    What is picked from a result of a region belongs to it, wherever it stands.
    """
    found: dict[int, list[fx.Node]] = {}
    member: dict[fx.Node, int] = {}
    releases: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        source = picks_from(node)
        number = member.get(source) if source is not None else node.meta.get(REGION)
        if number is None or node.op != "call_function":
            continue
        if node.target is ops.release:
            releases.setdefault(number, []).append(node)
        else:
            member[node] = number
            found.setdefault(number, []).append(node)
    sizes = size_nodes(graph)
    return [
        _region(number, nodes, releases.get(number, []), member, sizes)
        for number, nodes in sorted(found.items())
    ]


def size_nodes(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The first node of `graph` that is one symbol of a size, by torch's symbol."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            expression = torch_compat.size_expression(val)
            if expression.is_symbol:
                found.setdefault(expression, node)
    return found


def symbols_of(val: Any) -> list[Any]:
    """The symbols in the sizes of a value, in the order they are met."""
    if isinstance(val, Tensor):
        numbers: Iterable[Any] = (*val.shape, *val.stride())
    else:
        numbers = val if isinstance(val, (tuple, list)) else (val,)
    found: dict[Any, None] = {}
    for number in numbers:
        if isinstance(number, (Tensor, tuple, list)):
            found.update(dict.fromkeys(symbols_of(number)))
        elif isinstance(number, SYMBOLIC):
            expression = torch_compat.size_expression(number)
            found.update(dict.fromkeys(sorted(expression.free_symbols, key=str)))
    return list(found)


def _region(
    number: int,
    nodes: list[fx.Node],
    releases: list[fx.Node],
    member: Mapping[fx.Node, int],
    sizes: Mapping[Any, fx.Node],
) -> Region:
    inside = set(nodes)
    read: dict[fx.Node, None] = {}
    symbols: dict[fx.Node, None] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            if value not in inside and not is_fixed(value.meta.get("val")):
                read[value] = None
        if sizes:
            for val in (node.meta.get("val"), *(v.meta.get("val") for v in node.all_input_nodes)):
                symbols.update(dict.fromkeys(sizes[s] for s in symbols_of(val)))
    first = [*symbols, *(n for n in read if not isinstance(n.meta.get("val"), Tensor))]
    inputs = dict.fromkeys([*first, *read])
    outputs = [
        node
        for node in nodes
        if any(member.get(user) != number for user in node.users)
        and not is_fixed(node.meta.get("val"))
    ]
    return Region(number, tuple(nodes), tuple(inputs), tuple(outputs), tuple(releases))


# -- equal structure ------------------------------------------------------------------------------


def form_of(region: Region) -> tuple[Any, ...]:
    """What a region is compiled from: equal for regions that one compiled function serves."""
    names: dict[fx.Node, tuple[str, int]] = {}
    symbols: dict[Any, Any] = {}
    inputs = []
    for index, node in enumerate(region.inputs):
        names[node] = ("input", index)
        inputs.append(_shape_of(node.meta["val"], symbols))
    calls = []
    for index, node in enumerate(region.nodes):
        names[node] = ("node", index)
        calls.append((node.target, _constant(node.args, names), _constant(node.kwargs, names)))
    return tuple(inputs), tuple(calls), tuple(names[node][1] for node in region.outputs)


def _shape_of(val: Any, symbols: dict[Any, Any]) -> tuple[Any, ...]:
    if not isinstance(val, Tensor):
        return type(val).__name__, _renamed(val, symbols)
    shape = tuple(_renamed(size, symbols) for size in val.shape)
    strides = tuple(_renamed(stride, symbols) for stride in val.stride())
    return shape, strides, val.dtype, str(val.device)


def _renamed(size: Any, symbols: dict[Any, Any]) -> Any:
    """A size in which symbols are called by the order in which they are met."""
    if not isinstance(size, SYMBOLIC):
        return size
    expression = torch_compat.size_expression(size)
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(symbol, sympy.Symbol(f"size_{len(symbols)}"))
    return str(expression.xreplace(symbols))


def _constant(value: Any, names: Mapping[fx.Node, tuple[str, int]]) -> Any:
    """An argument, hashable, and with its type, as 1 is not 1.0."""
    if isinstance(value, fx.Node):
        return names[value] if value in names else _constant(value.meta["val"], names)
    if isinstance(value, (list, tuple)):
        return tuple(_constant(item, names) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _constant(value[key], names)) for key in value)
    if isinstance(value, slice):
        return tuple(_constant(v, names) for v in (value.start, value.stop, value.step))
    return type(value), repr(value) if isinstance(value, float) else value


def table_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> Regions:
    """The regions of a program's graph as a table; `nodes` are all its operators."""
    first: dict[Any, int] = {}
    forms, counts = [], []
    for region in regions_in(graph):
        forms.append(first.setdefault(form_of(region), region.number))
        counts.append(sum(map(works, region.nodes)))
    return Regions(tuple(forms), tuple(counts), sum(map(works, nodes)) - sum(counts))


def shown(nodes: Iterable[fx.Node], table: Regions | None) -> Iterator[str]:
    """The regions that `nodes` are of, as text: "region 2", "region 5 like 2"."""
    numbers = Counter(node.meta[REGION] for node in nodes if REGION in node.meta)
    for number in numbers:
        form = number if table is None else table.forms[number]
        yield f"region {number}" + ("" if form == number else f" like {form}")
