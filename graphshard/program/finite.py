"""The checks for NaN and infinity in a program, and the infinities that a value may well hold."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from math import isinf
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.program import ops
from graphshard.program.aliases import COPYING_OPS, is_view_op, unpacks
from graphshard.program.program import Program

_aten = torch.ops.aten


# Operators whose result may hold -inf where an operand does. All others, such as softmax, attention
# and matrix products, turn it into finite numbers or NaN, or hide it.
_KEEP_INFINITIES = frozenset(
    {
        _aten._log_softmax,
        _aten.add,
        _aten.amax,
        _aten.cat,
        _aten.constant_pad_nd,
        _aten.div,
        _aten.gather,
        _aten.index,
        _aten.index_put,
        _aten.index_select,
        _aten.log,
        _aten.log_softmax,
        _aten.masked_fill,
        _aten.max,
        _aten.maximum,
        _aten.min,
        _aten.minimum,
        _aten.mul,
        _aten.repeat,
        _aten.scatter,
        _aten.slice_scatter,
        _aten.stack,
        _aten.sub,
        _aten.tril,
        _aten.triu,
        _aten.where,
    }
)


@dataclass(frozen=True)
class Check:
    """The arguments of a `check_finite`; `of` is None if it is missing."""

    of: str | None
    masked: bool

    @classmethod
    def of_node(cls, node: fx.Node) -> Check:
        """Read the arguments of `node`."""
        of: Any = node.kwargs.get("of")
        return cls(of, bool(node.kwargs.get("masked")))


def checks_of(program: Program) -> list[fx.Node]:
    """The `check_finite` nodes whose numbers the program reports, in the order of its report."""
    reports = (node for node in program.nodes() if node.target is ops.report_finite)
    return [check for report in reports for check in values_of(report)]


def values_of(check: fx.Node) -> list[fx.Node]:
    """The values that a `check_finite` or `report_finite` reads."""
    values: Any = check.args[0]
    return list(values)


def final_gradients(reduce: fx.Node) -> list[fx.Node]:
    """The results of a reduce over several ranks that enter no other reduce and no accumulation.

    A result that is cast to its parameter's dtype is given as the cast.
    """
    results = [_cast_of(result) for wait in reduce.users for result in unpacks(wait)]
    return [result for result in results if not any(map(_takes_gradient, result.users))]


def _takes_gradient(user: fx.Node) -> bool:
    return user.target in ops.REDUCES or user.target is ops.accumulate_grad


def _cast_of(node: fx.Node) -> fx.Node:
    casts = [user for user in node.users if user.target is ops.cast]
    return casts[0] if casts else node


def is_floating(val: Any) -> bool:
    """Whether `val` is a tensor whose elements may be NaN or infinite."""
    return isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())


def may_hold_infinities(program: Program) -> set[fx.Node]:
    """The values of forward that may hold -inf although nothing went wrong, as masks do.

    They begin at operators with an infinity among their arguments, and at inputs, buffers and
    constants that are floating-point tensors, and end at operators that do not keep infinities.
    """
    ends = [b.node for b in program.buffers] + [i.node for i in program.inputs]
    held = {node for node in ends if is_floating(node.meta.get("val"))}
    for node in program.nodes():
        if (
            _has_infinity(node.args)
            or _has_infinity(node.kwargs.values())
            or (_keeps(node) and any(value in held for value in node.all_input_nodes))
        ):
            held.add(node)
    return held


def _keeps(node: fx.Node) -> bool:
    target: Any = node.target
    if target in COPYING_OPS or target is operator.getitem or is_view_op(target):
        return True
    return ops.is_transfer(node) or getattr(target, "overloadpacket", None) in _KEEP_INFINITIES


def _has_infinity(arguments: Iterable[Any]) -> bool:
    return any(
        isinf(argument)
        if isinstance(argument, float)
        else isinstance(argument, (list, tuple)) and _has_infinity(argument)
        for argument in arguments
    )
