"""Arguments of nodes as hashable keys: the one rule for constants that are equal in structure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.torch_private.compat import SYMBOLIC

_LEAVES = (fx.Node, Tensor, *SYMBOLIC)

_ATOMS = frozenset({int, bool, str, type(None), torch.dtype})
"""Types of most constants, told first: keys are made of every argument of every node."""


def argument_key(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """A hashable key of an argument, equal for arguments that are equal in structure.

    A constant goes with its type, as 1 and 1.0 differ, and a float by its text, as 0.0 and -0.0
    differ and NaN equals itself.

    Args:
        value: an argument of a node, or a value: constants and containers of them.
        leaf: gives the key of a node, a tensor or a symbolic number in it.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, _LEAVES):
        return leaf(value)
    if isinstance(value, (list, tuple)):
        return tuple([argument_key(item, leaf) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, argument_key(value[key], leaf)) for key in sorted(value)])
    if isinstance(value, slice):
        return tuple([argument_key(end, leaf) for end in (value.start, value.stop, value.step)])
    return kind, repr(value) if isinstance(value, float) else value
