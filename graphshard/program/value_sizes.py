"""Sizes that depend on the values of tensors: their names, their bounds, and the checks on them.

Operators such as `nonzero`, and `.item()`, read a number off values. A program names each of these
numbers u0, u1 and so on, in the order of its graph. One node computes it, so it is another number
in each call and on each rank. What the model promises about it (`torch._check`) is checked in each
call by a node of the program, since the trace relied on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from graphshard.errors import SizeCheckError
from graphshard.torch_private import compat as torch_compat


@dataclass(frozen=True)
class ValueSize:
    """A number that an operator reads off values.

    Attributes:
        name: the number's name in the program.
        symbol: torch's symbol.
        source: the name of the node that computes it, or whose result has it as a size.
        where: the FQN of the module it came from.
        bound: the most it can be; None if nobody knows.
        assumed: the value that estimates of time and memory take for it.
    """

    name: str
    symbol: Any
    source: str
    where: str
    bound: int | None
    assumed: int

    def __str__(self) -> str:
        most = f"at most {self.bound}" if self.bound is not None else "no bound known"
        where = f" in {self.where}" if self.where else ""
        return (
            f"size {self.name}: by the values of %{self.source}{where}; {most}, estimates take "
            f"{self.assumed}"
        )


def assumed_text(assumed: Mapping[str, int]) -> str:
    """The assumptions of estimates, as one line: "u0, u1 assumed 12, u2 assumed 4; ..."."""
    by_value: dict[int, list[str]] = {}
    for name, value in assumed.items():
        by_value.setdefault(value, []).append(name)
    texts = [f"{', '.join(names)} assumed {value:,}" for value, names in by_value.items()]
    return f"{', '.join(texts)}; they depend on values, and bytes and times on them"


def check_sizes(condition: str, line: str | None, numbers: Mapping[str, Any]) -> None:
    """Check what the capture relied on.

    Args:
        condition: an expression of Python over the names in `numbers`.
        line: the user's line that states it.
        numbers: the values in this call.
    """
    if not eval(_compiled(condition), _functions(), dict(numbers)):
        values = ", ".join(f"{name}={value}" for name, value in numbers.items())
        at = f"\n  at {line}" if line else ""
        raise SizeCheckError(
            f"the model relies on {condition}, which does not hold in this call: {values}; pass "
            f"values for which it does, or change what asks for it, as a torch._check may{at}"
        )


check_sizes.__module__ = "graphshard"  # fx prints a call by it


@cache
def _compiled(condition: str) -> CodeType:
    return compile(condition, "<condition>", "eval")


@cache
def _functions() -> dict[str, Any]:
    return torch_compat.size_functions()
