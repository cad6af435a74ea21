"""A policy as code: text that makes an equal policy where it is pasted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.mixed_precision import MixedPrecision
from graphshard.policy_base import Policy

_NAMED = ("classes", "recompute")
"""Fields in which a class may be given by its name."""


def policy_code(policy: Policy) -> str:
    """An expression that `eval` turns into an equal policy, given `import graphshard, torch`.

    Only what is not as by default is written. Classes are written as their names where a field
    takes names (a name matches no subclasses), else as the dotted name they can be imported by. A
    function, a module or a tensor has no such text: its name or type is shown instead.
    """
    said = []
    for index, field in enumerate(_in_call_order(policy)):
        value = getattr(policy, field.name)
        if value == field.default:
            continue
        text = _code(value, field.name in _NAMED)
        said.append(text if index == 0 else f"{field.name}={text}")
    return f"{_prefix(type(policy))}{type(policy).__name__}({', '.join(said)})"


def _in_call_order(policy: Policy) -> list[Field[Any]]:
    """The fields as `__init__` takes them: its own by position, then those every policy has."""
    return sorted(fields(policy), key=lambda field: field.kw_only is True)


def _code(value: Any, named: bool = False) -> str:
    if isinstance(value, type):
        return repr(value.__name__) if named else f"{_prefix(value)}{value.__qualname__}"
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(_code(entry, named) for entry in value)) + "}"
    for kinds, code in _CODES:
        if isinstance(value, kinds):
            return code(value)
    return repr(value)


def _precision_code(value: MixedPrecision) -> str:
    own = {f.name: getattr(value, f.name) for f in fields(value)}
    said = [f"{f.name}={_code(own[f.name])}" for f in fields(value) if own[f.name] != f.default]
    return f"graphshard.MixedPrecision({', '.join(said)})"


def _mapping_code(value: Mapping[Any, Any]) -> str:
    return "{" + ", ".join(f"{_code(k)}: {_code(v)}" for k, v in value.items()) + "}"


_CODES: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (Policy, policy_code),
    (MixedPrecision, _precision_code),
    (tuple, lambda v: f"({', '.join(map(_code, v))}{',' if len(v) == 1 else ''})"),
    (Mapping, _mapping_code),
    ((Tensor, nn.Module), lambda value: f"<{type(value).__name__}>"),
    (bool, repr),
    (int, lambda value: f"{value:_}"),
    (str, lambda value: repr(str(value))),  # of a strategy its name
    (torch.dtype, repr),
    (Callable, lambda value: str(getattr(value, "__qualname__", type(value).__name__))),
)


def _prefix(kind: type) -> str:
    """Where `kind` is found: in `graphshard`, in `torch.nn`, or in a module of the user's."""
    module = kind.__module__
    if module.startswith("graphshard."):
        return "graphshard."
    if module.startswith("torch.nn.modules."):
        return "torch.nn."
    return "" if module in ("builtins", "__main__") else f"{module}."
