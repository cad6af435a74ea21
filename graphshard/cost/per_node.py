"""Costs that are computed once: per node while its values stay, and once for equal operations.

A plan is simulated many times, by passes that try one order or another of the same program and by
searches over policies. Copies of a program share the values (`meta["val"]`) of its nodes, so what
was found for a node is kept in its `meta`, with the values it was found for, and holds for its
copies. Models repeat their layers, so what is new is looked up by operator, shapes, strides, dtypes
and constants before it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import fx

Cost = TypeVar("Cost")


_KEPT = 1 << 16  # distinct operations; a model has some hundred


def once_per_operation(key: str, cost: Callable[[fx.Node], Cost]) -> Callable[[fx.Node], Cost]:
    """`cost`, a function of a node's target, constants and values, computed once for equal ones.

    Args:
        key: of `node.meta`, where the cost of a node is kept.
        cost: what to compute.
    """
    by_form: dict[Any, Cost] = {}

    @wraps(cost)
    def of(node: fx.Node) -> Cost:
        values = [node.target, node.meta.get("val")]
        values += [value.meta.get("val") for value in node.all_input_nodes]
        kept = node.meta.get(key)
        if (
            kept is not None
            and _same(kept[0], values)
            and _agree(kept[1], node.args)
            and (not node.kwargs or _agree(kept[2], _named(node)))
        ):
            return cast("Cost", kept[3])
        form = _form_of(node)
        found = None if form is None else by_form.get(form)
        if found is None:
            found = cost(node)
            if form is not None:
                if len(by_form) >= _KEPT:
                    by_form.clear()
                by_form[form] = found
        constants = tuple(map(_constant, node.args)), tuple(map(_constant, _named(node)))
        node.meta[key] = (values, *constants, found)
        return found

    return of


def _same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(is_, values, others))


def _named(node: fx.Node) -> tuple[Any, ...]:
    return (*node.kwargs, *node.kwargs.values())


def _constant(arg: Any) -> Any:
    """`arg` with `_VALUE` for each value in it."""
    if isinstance(arg, fx.Node):
        return _VALUE
    return tuple(map(_constant, arg)) if isinstance(arg, (list, tuple)) else arg


_VALUE = object()


def _agree(constants: tuple[Any, ...], args: Collection[Any]) -> bool:
    """Whether `args` have these constants; as `_constant` makes them, but with nothing made."""
    if len(constants) != len(args):
        return False
    for constant, arg in zip(constants, args, strict=True):
        if constant is _VALUE:
            if not isinstance(arg, fx.Node):
                return False
        elif isinstance(arg, (list, tuple)):
            if type(constant) is not tuple or not _agree(constant, arg):
                return False
        elif constant is not arg and constant != arg:
            return False
    return True


def _form_of(node: fx.Node) -> Any:
    """What the cost of `node` depends on, hashable; None where a size is symbolic."""
    try:
        form = node.target, _form(node.args), _form(node.kwargs), _form(node.meta.get("val"))
        hash(form)
    except TypeError:
        return None
    return form


def _form(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _form(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        shape, strides = tuple(value.shape), tuple(value.stride())
        if any(type(number) is not int for number in (*shape, *strides)):
            raise TypeError("a symbolic size stands for different numbers")
        return shape, strides, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    return type(value), value
