"""Equations on columns of gradients, for the rule on values (see `graphshard.verify_values`).

the embedding's gradient of columns of a gradient     these columns of that of the whole
such columns + the same columns of x                  these columns of the sum with x
a cast of columns of x                                columns of x cast
all columns of x, reduced, side by side               x, reduced
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphshard import ops

if TYPE_CHECKING:
    from graphshard.verify_values import Number, Values

_aten = torch.ops.aten

REDUCED = "reduced"
COLUMNS = "columns"
"""What keys of values begin with that no operator computes."""


def of_columns(values: Values, node: fx.Node) -> Number | None:
    """The number of some columns of a gradient, or of a whole one made of columns."""
    if node.target is _aten.embedding_dense_backward.default:
        return _of_embedding(values, node)
    if node.target is ops.cast and (part := _columns(values, values.number(node.args[0]))):
        dtype = values.number(node.kwargs["dtype"])
        return values.intern((COLUMNS, values.intern((ops.cast, (part[0], dtype), ())), *part[1:]))
    if node.target is _aten.add.Tensor:
        return _of_sum(values, node)
    pieces = ops.joined(node)
    if not pieces or node.args[1] != node.meta["val"].dim() - 1:
        return None
    wholes: set[Number] = set()
    end = 0
    for piece in pieces:
        part = _columns(values, values.keys[values.of_node[piece]][1])
        if part is None or part[1] != end:
            return None
        wholes.add(part[0])
        end = part[2]
    return values.intern((REDUCED, wholes.pop())) if len(wholes) == 1 else None


def _of_embedding(values: Values, node: fx.Node) -> Number | None:
    """The number of an embedding's gradient, if the gradient it is given is some columns."""
    part: Any = node.args[0]
    if part.target is not _aten.slice.Tensor or len(part.args) != 4:
        return None
    source, dim, start, stop = part.args
    if dim != part.meta["val"].dim() - 1:
        return None
    args = (values.number(source), *map(values.number, node.args[1:]))
    whole = values.intern((node.target, args, values.number(node.kwargs)))
    values.name.setdefault(whole, node.name)
    return values.intern((COLUMNS, whole, start, stop))


def _of_sum(values: Values, node: fx.Node) -> Number | None:
    """The number of a sum of the same columns of two values, one of them an embedding's."""
    parts = [_columns(values, values.number(value)) for value in node.args]
    if len(parts) != 2 or node.kwargs or parts.count(None) != 1:
        return None
    known = parts[0] or parts[1]
    other: Any = node.args[parts.index(None)]
    assert known is not None
    wanted = [other.meta["val"].dim() - 1, *known[1:]] if isinstance(other, fx.Node) else []
    if not wanted or other.target is not _aten.slice.Tensor or list(other.args[1:]) != wanted:
        return None
    whole = values.number(other.args[0])
    args = (known[0], whole) if parts[0] else (whole, known[0])
    total = values.intern((node.target, args, ()))
    return values.intern((COLUMNS, total, *known[1:]))


def _columns(values: Values, number: Number) -> tuple[Number, int, int] | None:
    """Of what `number` is some columns, and of which, if it is."""
    key = values.keys[number] if isinstance(number, int) else ()
    return (key[1], key[2], key[3]) if key[:1] == (COLUMNS,) else None
