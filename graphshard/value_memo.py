"""What the rule on values remembers of a node from one pass to the next.

Most passes leave most nodes alone, and numbering a node anew (see `graphshard.verify_values`) puts
its arguments together again. Of an operator that no equation is about the number follows from its
arguments and theirs: where these are the same, so is it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten

# Operators that an equation of `verify_values`, or of `column_values`, is about.
_WITH_EQUATIONS = frozenset(
    {
        _aten._to_copy.default,
        _aten.add.Tensor,
        _aten.cat.default,
        _aten.clone.default,
        _aten.embedding_dense_backward.default,
        torch.ops.prims.convert_element_type.default,
    }
)

_Operator = type(_aten.add.Tensor)


@cache
def is_plain(target: Any) -> bool:
    """Whether no equation but that of equal operators on equal arguments holds for `target`."""
    return isinstance(target, _Operator) and target not in _WITH_EQUATIONS


@dataclass(frozen=True, slots=True)
class Known:
    """What a node was numbered from. Arguments of nodes are replaced, and never changed.

    plain: no equation is about its operator, so that its number follows from nothing else.
    """

    target: Any
    args: Any
    kwargs: Any
    inputs: list[fx.Node]
    numbers: list[Any]
    number: int
    effect: bool
    plain: bool

    def is_of(self, node: fx.Node, numbers: Mapping[fx.Node, Any]) -> bool:
        """Whether `node` has the operator and arguments it had, and these their numbers."""
        same = node.args is self.args and node.kwargs is self.kwargs and node.target is self.target
        return same and [numbers[value] for value in self.inputs] == self.numbers
