"""A cache of costs, per node and per equal operation.

A program is simulated many times. Copies of a program share the values (`meta["val"]`) of its
nodes, so a cost is stored in a node's `meta` with the values it was computed from, and stays valid
for copies of the node. Models repeat layers, so a new node is first looked up by operator, shapes,
strides, dtypes and constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import fx

from graphshard.program.arguments import argument_key

Cost = TypeVar("Cost")


_MAX_OPERATIONS = 1 << 16  # a model has some hundred distinct operations


def once_per_operation(key: str, cost: Callable[[fx.Node], Cost]) -> Callable[[fx.Node], Cost]:
    """Cache `cost`, a function of a node's target, constants and values.

    Args:
        key: the key of `node.meta` under which the cost of a node is stored.
        cost: the function to cache.
    """
    by_form: dict[Any, Cost] = {}

    @wraps(cost)
    def cached(node: fx.Node) -> Cost:
        values = [node.target, node.meta.get("val")]
        values += [value.meta.get("val") for value in node.all_input_nodes]
        entry = node.meta.get(key)
        if (
            entry is not None
            and _same(entry[0], values)
            and _agree(entry[1], node.args)
            and (not node.kwargs or _agree(entry[2], _keywords(node)))
        ):
            return cast("Cost", entry[3])
        form = _form_of(node)
        result = None if form is None else by_form.get(form)
        if result is None:
            result = cost(node)
            if form is not None:
                if len(by_form) >= _MAX_OPERATIONS:
                    by_form.clear()
                by_form[form] = result
        constants = tuple(map(_constant, node.args)), tuple(map(_constant, _keywords(node)))
        node.meta[key] = (values, *constants, result)
        return result

    return cached


def _same(values: list[Any], others: list[Any]) -> bool:
    """Whether both lists hold the same objects."""
    return len(values) == len(others) and all(map(is_, values, others))


def _keywords(node: fx.Node) -> tuple[Any, ...]:
    """Names and values of the keyword arguments of `node`."""
    return (*node.kwargs, *node.kwargs.values())


def _constant(arg: Any) -> Any:
    """`arg` with each node in it replaced by `_VALUE`."""
    if isinstance(arg, fx.Node):
        return _VALUE
    return tuple(map(_constant, arg)) if isinstance(arg, (list, tuple)) else arg


_VALUE = object()


def _agree(constants: tuple[Any, ...], args: Collection[Any]) -> bool:
    """Whether `_constant` of each of `args` equals `constants`, without building it."""
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
    """A hashable key of all that the cost of `node` depends on; None if a size is symbolic."""
    try:
        form = node.target, _form(node.args), _form(node.kwargs), _form(node.meta.get("val"))
        hash(form)
    except TypeError:
        return None
    return form


def _form(value: Any) -> Any:
    return argument_key(value, _form_of_leaf)


def _form_of_leaf(value: Any) -> Any:
    """The form of a node's value, or of a tensor: shape, strides and dtype."""
    if isinstance(value, fx.Node):
        return _form(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        shape, strides = tuple(value.shape), tuple(value.stride())
        if all(type(number) is int for number in (*shape, *strides)):
            return shape, strides, value.dtype
    raise TypeError("a symbolic size stands for different numbers")
