"""Regions: stretches of compute that are compiled, each as one function.

A region is a sequence of compute nodes of one unit and one phase. Between them stand no vocabulary
ops but releases, so compiling a region moves nothing across a collective, a wait, a free or a
transfer. `meta["region"]` of each node holds the region's number. Two regions have the same form if
their structure is equal: operators, constants, shapes, strides, dtypes, devices, and which results
are read outside. Each form is compiled once, whatever the depth of the model.

Three kinds of nodes may stand between a region's nodes without being part of it, as they need no
result of it: nodes that compute sizes, nodes that pick results of a `wait` or of an operator
outside, and nodes that run elsewhere.

A `release` between a region's nodes belongs to the region but is not compiled. At that point the
region's operands hold the last reference to the parameter, and compiled code drops each operand
after its last use, as eager operators do. So the memory is freed in the region, in whatever order
the compiler chooses. Releases make no difference to a form.
"""

from __future__ import annotations

import keyword
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
from graphshard.program.program import argument_key
from graphshard.program.size_nodes import symbol_nodes
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.kernels import computes_otherwise

REGION = "region"
"""The key of `node.meta` that holds a region's number."""


_aten = torch.ops.aten


# Torch's fake kernel of the first accepts only bfloat16; the second reads a storage by offsets.
_LEFT_OUT = frozenset({_aten._grouped_mm, _aten.as_strided})


_BY_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Region:
    """One region of a graph, and the releases that stand between its nodes.

    `inputs` are the nodes that it reads, sizes first. They include a node for every symbol of a
    size, and no numbers that are the same in every call; neither do `outputs`, its nodes that are
    read outside.
    """

    number: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    releases: tuple[fx.Node, ...]


# -- nodes of a region ----------------------------------------------------------------------------


def works(node: fx.Node) -> bool:
    """Whether `node` is an operator that computes, rather than views or picks, a value."""
    return ops.is_compute(node) and not (
        node.target is operator.getitem or is_view_op(node.target) or not _is_operator(node)
    )


def may_join(node: fx.Node) -> bool:
    """Whether `node` may be compiled: it writes to no operand and returns plain tensors.

    Compiled code is made from fake kernels, so operators for which these err run by themselves.
    """
    if not ops.is_compute(node) or not _is_operator(node) or ops.writes(node):
        return False
    target: Any = node.target
    if keyword.iskeyword(target._overloadname):  # `random.from`: no code can be written for it
        return False
    if target.overloadpacket in _LEFT_OUT or any(tag in target.tags for tag in _BY_DATA):
        return False
    operands = [value.meta.get("val") for value in node.all_input_nodes]
    if not all(map(_is_operand, operands)) or computes_otherwise(target, operands):
        return False
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return all(
            user.target is operator.getitem
            and (_is_plain(picked := user.meta.get("val")) or is_fixed(picked) or not user.users)
            for user in node.users
        )
    return _is_plain(val)


def picks_from(node: fx.Node) -> fx.Node | None:
    """The node from whose results `node` picks one; None if it does not pick."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """The value that `node` is a view of; None if it is no view."""
    source = picks_from(node) or node
    bases = alias_inputs(source) if is_view_op(source.target) else []
    return bases[0] if bases else None


def _is_operator(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _is_plain(val: Any) -> bool:
    """Whether a value is a strided tensor that is not quantized."""
    return isinstance(val, Tensor) and val.layout is torch.strided and not val.is_quantized


def is_fixed(val: Any) -> bool:
    """Whether a value is the same in every call: a plain number, or None."""
    return val is None or type(val) in (int, float, bool)


def _is_operand(val: Any) -> bool:
    return _is_plain(val) or is_fixed(val) or isinstance(val, torch.SymInt)


# -- reading regions off a graph ------------------------------------------------------------------


def regions_in(graph: fx.Graph) -> list[Region]:
    """The regions of a graph in order; the graph is a whole program's, or that of one phase.

    A node that picks from a result of a region belongs to the region, wherever it stands.
    """
    nodes_by_region: dict[int, list[fx.Node]] = {}
    region_of: dict[fx.Node, int] = {}
    releases: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        source = picks_from(node)
        number = region_of.get(source) if source is not None else node.meta.get(REGION)
        if number is None or node.op != "call_function":
            continue
        if node.target is ops.release:
            releases.setdefault(number, []).append(node)
        else:
            region_of[node] = number
            nodes_by_region.setdefault(number, []).append(node)
    sizes = size_nodes(graph)
    return [
        _region(number, nodes, releases.get(number, []), region_of, sizes)
        for number, nodes in sorted(nodes_by_region.items())
    ]


def size_nodes(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The first node for each symbol of a size (no floating-point number), by torch's symbol."""
    return symbol_nodes(n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt))


def symbols_of(val: Any) -> list[Any]:
    """The symbols in the sizes of a value, in the order of their first occurrence."""
    if isinstance(val, Tensor):
        numbers: Iterable[Any] = (*val.shape, *val.stride())
    else:
        numbers = val if isinstance(val, (tuple, list)) else (val,)
    symbols: dict[Any, None] = {}
    for number in numbers:
        if isinstance(number, (Tensor, tuple, list)):
            symbols.update(dict.fromkeys(symbols_of(number)))
        elif isinstance(number, SYMBOLIC):
            expression = torch_compat.size_expression(number)
            symbols.update(dict.fromkeys(sorted(expression.free_symbols, key=str)))
    return list(symbols)


def _region(
    number: int,
    nodes: list[fx.Node],
    releases: list[fx.Node],
    region_of: Mapping[fx.Node, int],
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
        if any(region_of.get(user) != number for user in node.users)
        and not is_fixed(node.meta.get("val"))
    ]
    return Region(number, tuple(nodes), tuple(inputs), tuple(outputs), tuple(releases))


# -- equal structure ------------------------------------------------------------------------------


def form_of(region: Region) -> tuple[Any, ...]:
    """A hashable key that is equal for regions that one compiled function can serve."""
    names: dict[fx.Node, tuple[str, int]] = {}
    symbols: dict[Any, Any] = {}
    inputs = []
    for index, node in enumerate(region.inputs):
        names[node] = ("input", index)
        inputs.append(_shape_of(node.meta["val"], symbols))
    calls = []

    def leaf(value: Any) -> Any:
        """A node's name in the region; outside of it a node gives a constant."""
        if not isinstance(value, fx.Node):
            return type(value), value
        return names[value] if value in names else argument_key(value.meta["val"], leaf)

    for index, node in enumerate(region.nodes):
        names[node] = ("node", index)
        arguments = argument_key(node.args, leaf), argument_key(node.kwargs, leaf)
        calls.append((node.target, *arguments))
    return tuple(inputs), tuple(calls), tuple(names[node][1] for node in region.outputs)


def _shape_of(val: Any, symbols: dict[Any, Any]) -> tuple[Any, ...]:
    if not isinstance(val, Tensor):
        return type(val).__name__, _renamed(val, symbols)
    shape = tuple(_renamed(size, symbols) for size in val.shape)
    strides = tuple(_renamed(stride, symbols) for stride in val.stride())
    return shape, strides, val.dtype, str(val.device)


def _renamed(size: Any, symbols: dict[Any, Any]) -> Any:
    """A size as text, with its symbols renamed in the order of their first occurrence."""
    if not isinstance(size, SYMBOLIC):
        return size
    expression = torch_compat.size_expression(size)
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(symbol, sympy.Symbol(f"size_{len(symbols)}"))
    return str(expression.xreplace(symbols))


def table_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> Regions:
    """Summarize the regions of a program's graph; `nodes` are all its `call_function` nodes."""
    first: dict[Any, int] = {}
    forms, counts = [], []
    for region in regions_in(graph):
        forms.append(first.setdefault(form_of(region), region.number))
        counts.append(sum(map(works, region.nodes)))
    return Regions(tuple(forms), tuple(counts), sum(map(works, nodes)) - sum(counts))


def region_labels(nodes: Iterable[fx.Node], table: Regions | None) -> Iterator[str]:
    """The regions that contain `nodes`, as text: "region 2", "region 5 like 2"."""
    numbers = Counter(node.meta[REGION] for node in nodes if REGION in node.meta)
    for number in numbers:
        form = number if table is None else table.forms[number]
        yield f"region {number}" + ("" if form == number else f" like {form}")
