"""A policy as code: an expression that makes an equal policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.hardware.hardware import Hardware, preset_names
from graphshard.policy.precision import MixedPrecision

_NAMED = ("classes", "recompute")
"""Fields in which a class may be given by its name."""


class PrintsAsCode:
    """A dataclass of the policy kind: its `repr` is the code that makes an equal one."""

    def __repr__(self) -> str:
        return policy_code(self)


def policy_code(policy: Any) -> str:
    """Return an expression that `eval` turns into an equal policy after `import graphshard, torch`.

    Fields with default values are left out. A class is written as its name where the field takes
    names (a name matches no subclasses), else as its dotted import path. Functions, modules and
    tensors cannot be written as code: their name or type is shown instead.
    """
    arguments = []
    for index, field in enumerate(_in_call_order(policy)):
        value = getattr(policy, field.name)
        if value == field.default:
            continue
        text = value_code(value, field.name in _NAMED)
        arguments.append(text if index == 0 else f"{field.name}={text}")
    return f"{_prefix(type(policy))}{type(policy).__name__}({', '.join(arguments)})"


def _in_call_order(policy: Any) -> list[Field[Any]]:
    """The fields in the order of `__init__`: the class's own by position, then the shared ones."""
    return sorted(fields(policy), key=lambda field: field.kw_only is True)


def value_code(value: Any, named: bool = False) -> str:
    """Return `value` as code, with classes written as their names if `named`."""
    if isinstance(value, type):
        return repr(value.__name__) if named else f"{_prefix(value)}{value.__qualname__}"
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(value_code(entry, named) for entry in value)) + "}"
    for kinds, code in _CODES:
        if isinstance(value, kinds):
            return code(value)
    return repr(value)


def _precision_code(value: MixedPrecision) -> str:
    values = {f.name: getattr(value, f.name) for f in fields(value)}
    arguments = [
        f"{f.name}={value_code(values[f.name])}"
        for f in fields(value)
        if values[f.name] != f.default
    ]
    return f"graphshard.MixedPrecision({', '.join(arguments)})"


def _mapping_code(value: Mapping[Any, Any]) -> str:
    return "{" + ", ".join(f"{value_code(k)}: {value_code(v)}" for k, v in value.items()) + "}"


def _hardware_code(value: Hardware) -> str:
    if value.name in preset_names() and Hardware.load(value.name) == value:
        return repr(value.name)
    return f"graphshard.Hardware(**{value.to_dict()})"


_CODES: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (PrintsAsCode, policy_code),
    (MixedPrecision, _precision_code),
    (Hardware, _hardware_code),
    (os.PathLike, lambda value: repr(os.fspath(value))),
    (tuple, lambda v: f"({', '.join(map(value_code, v))}{',' if len(v) == 1 else ''})"),
    (Mapping, _mapping_code),
    ((Tensor, nn.Module), lambda value: f"<{type(value).__name__}>"),
    (bool, repr),
    (int, lambda value: f"{value:_}"),
    (str, lambda value: repr(str(value))),  # a Strategy becomes its name
    (torch.dtype, repr),
    (Callable, lambda value: str(getattr(value, "__qualname__", type(value).__name__))),
)


def _prefix(kind: type) -> str:
    """The import path before the name of `kind`, with its dot; "" if it needs none."""
    module = kind.__module__
    if module.startswith("graphshard."):
        return "graphshard."
    if module.startswith("torch.nn.modules."):
        return "torch.nn."
    return "" if module in ("builtins", "__main__") else f"{module}."
