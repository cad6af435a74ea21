"""The error for code that decides by a number that depends on values: which line, what to do."""

from __future__ import annotations

from typing import Any

import sympy

from graphshard.program.sizes import expression_text
from graphshard.torch_private import unbacked


def undecided_reason(error: Any, environment: Any, line: str) -> str:
    """The reason of a CaptureError, for one of `unbacked.undecided_error()`.

    Args:
        error: torch's error, which has the question as `cond`.
        environment: the ShapeEnv of the trace.
        line: the user's line at fault.
    """
    condition = error.cond
    lines = {s: unbacked.origin_of(environment, s) for s in condition.free_symbols}
    origins = "".join(
        f"\n  {symbol} is read at {origin}"
        for symbol, origin in sorted(lines.items(), key=str)
        if origin is not None and origin != line
    )
    rule = "the model's control flow depends on the values of a tensor"
    number = not (condition.is_Relational or condition.is_Boolean)
    if number or " for " in line or ".tolist()" in line:
        needed = f"the number {condition}" if number else "the number of rounds of a loop"
        return (
            f"{rule}: it needs {needed}, which one graph cannot have (range, int, indices of lists "
            "and loops over .tolist() ask for it); go over all items that there may be, do it by "
            "tensor operators (a mask, index_add, torch.arange), or make the number a Python "
            f"argument of forward{origins}"
        )
    text, checks = _question(condition, environment)
    return (
        f"{rule}: this line asks whether {text}, and one graph holds one answer. If the model "
        "chooses by it, compute both ways and choose by torch.where or a mask, or make the value "
        "a Python argument of forward. If the answer is always the same, state it before this "
        f"line by {checks}, which each call then checks{origins}"
    )


def _question(condition: Any, environment: Any) -> tuple[str, str]:
    """A condition as text, and the checks of which one answers it."""
    text = expression_text(condition, {})
    checks = f"torch._check({text}) or torch._check({expression_text(sympy.Not(condition), {})})"
    (symbol, *others) = condition.free_symbols
    truth_value = isinstance(condition, sympy.Eq) and not others
    if truth_value and unbacked.upper_bound(environment, symbol) == 1:
        return "the tensor is true", "torch._check(tensor.item())"
    return text, checks
