"""Sizes and numbers that operators read off the values of tensors: torch's unbacked symbols.

They come from operators such as `nonzero` or `.item()`. No example gives them a value, so a trace
cannot decide by them; what the model promises about them (`torch._check`) is checked in each call.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from graphshard.errors import CaptureError, user_line_of
from graphshard.torch_private.compat import SYMBOLIC, private, size_expression
from graphshard.torch_private.patches import patched

_SHAPES = "torch.fx.experimental.symbolic_shapes"

_aten = torch.ops.aten

ITEM = _aten._local_scalar_dense.default
"""The operator behind `Tensor.item()`."""

_READERS = (
    *(ITEM, _aten.nonzero.default, _aten.index.Tensor, _aten.masked_select.default),
    *(_aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default),
)
"""Operators whose numbers or sizes a promise may be about though no node reads what they give."""


@dataclass(frozen=True)
class Promise:
    """A condition on symbols that a trace assumed, and the line of user code that states it.

    is_guess: the trace may as well assume the contrary.
    """

    condition: Any
    line: str | None
    is_guess: bool = False


def raw_symbols(value: Any) -> list[Any]:
    """The unbacked symbols in the value of a node as it was traced, whatever equals them by now.

    They are those in the sizes of a tensor, or in a number, in order of first occurrence.
    """
    if isinstance(value, torch.Tensor):
        numbers: tuple[Any, ...] = tuple(value.shape)
    elif isinstance(value, (tuple, list)):
        return list(dict.fromkeys(symbol for each in value for symbol in raw_symbols(each)))
    else:
        numbers = (value,)
    symbols: dict[Any, None] = {}
    for number in numbers:
        if isinstance(number, SYMBOLIC):
            symbols.update(dict.fromkeys(filter(is_unbacked, number.node._expr.free_symbols)))
    return list(symbols)


def raw_expression(size: Any) -> Any:
    """The expression of a size as it was traced, without what is known to equal it by now."""
    return size.node._expr


def is_unbacked(symbol: Any) -> bool:
    """Whether a symbol of torch's stands for a number that depends on values."""
    is_type = private("torch.utils._sympy.symbol", "symbol_is_type")
    kinds = private("torch.utils._sympy.symbol", "SymT")
    return bool(is_type(symbol, (kinds.UNBACKED_INT, kinds.UNBACKED_FLOAT)))


def depends_on_values(size: Any) -> bool:
    """Whether a number is symbolic and has an unbacked symbol in it."""
    return isinstance(size, SYMBOLIC) and any(map(is_unbacked, size_expression(size).free_symbols))


def binds(node: fx.Node) -> bool:
    """Whether the operator of a traced node is the one that reads a symbol off values."""
    return bool(node.meta.get("unbacked_bindings"))


def upper_bound(environment: Any, symbol: Any) -> int | None:
    """The largest value that a symbol can have; None if that is not known."""
    interval = environment.var_to_range.get(symbol)
    upper = None if interval is None else interval.upper
    if upper is None or not getattr(upper, "is_Integer", False) or upper >= 2**62:
        return None
    return max(0, int(upper))


def all_symbols(environment: Any) -> list[Any]:
    """All unbacked symbols so far, in the order they were made."""
    return [symbol for symbol in environment.var_to_range if is_unbacked(symbol)]


def forget_promises(environment: Any) -> None:
    """Drop the promises so far."""
    environment.deferred_runtime_asserts.clear()


def promises(environment: Any, equal: Mapping[Any, Any]) -> Iterator[Promise]:
    """The conditions on unbacked symbols that a trace assumed; those in `equal` read as others."""
    seen = {sympy.true}
    for deferred in environment.deferred_runtime_asserts.values():
        for each in deferred:
            condition = each.expr.xreplace(equal)
            if condition not in seen:
                seen.add(condition)
                yield Promise(condition, _line(each.stack), each.msg == _GUESS)


def _line(stack: Any) -> str | None:
    return user_line_of(traceback.StackSummary.from_list(stack.summary()))


def equate(environment: Any, equal: Mapping[Any, Any]) -> None:
    """Let every size read the symbols in `equal` as others, with no condition on them."""
    environment.replacements.update(equal)
    if hasattr(environment, "_replacements_version_counter"):
        environment._replacements_version_counter += 1
    environment._update_version_counter()


def undecided_error() -> type[Exception]:
    """The error torch raises where code decides by an unbacked symbol; `cond` is the question."""
    return private(_SHAPES, "GuardOnDataDependentSymNode")


def asks_if_empty(condition: Any) -> bool | None:
    """The answer for a size that is not 0, if `condition` asks nothing but that; None otherwise."""
    if not condition.is_Relational or len(condition.free_symbols) != 1:
        return None
    (symbol,) = condition.free_symbols
    if is_float(symbol):
        return None
    try:
        of_none, *of_some = (bool(condition.xreplace({symbol: n})) for n in _SIZES_TO_TRY)
    except (ArithmeticError, TypeError):  # as of `6 % n == 0`
        return None
    return of_some[0] if of_none not in of_some else None


_SIZES_TO_TRY = tuple(map(sympy.Integer, (0, 1, 2, 3, 10**9)))


@contextlib.contextmanager
def answering(environment: Any, answer: Callable[[Any], Any]) -> Iterator[None]:
    """Let `answer` decide where code decides by unbacked symbols.

    answer: takes the condition, or the number asked for; gives torch's, or None for an error.
    """
    evaluate = environment.evaluate_expr

    def answered(expression: Any, *args: Any, **kwargs: Any) -> Any:
        # Torch proves conditions on floats as algebra does, and NaN and infinity are none of its.
        symbols = getattr(expression, "free_symbols", ())
        if any(is_unbacked(symbol) and is_float(symbol) for symbol in symbols):
            value = answer(expression)
            if value is None:
                raise undecided_error()(expression, "a condition on a floating-point number")
            return value
        try:
            return evaluate(expression, *args, **kwargs)
        except undecided_error() as error:
            value = answer(error.cond)  # type: ignore[attr-defined]
            if value is None:
                raise
            return value

    with patched(environment, "evaluate_expr", answered, where="ShapeEnv.evaluate_expr"):
        yield


def ignore_new_symbols(environment: Any) -> Any:
    """The context in which no operator of a trace is looked for that reads new symbols."""
    return environment.ignore_fresh_unbacked_symbols()


_GUESS = "graphshard guesses so"


def promise(environment: Any, condition: Any, *, is_guess: bool = False) -> None:
    """Take `condition` to be true, as `torch._check` does."""
    text = _GUESS if is_guess else "graphshard decides so"
    environment.guard_or_defer_runtime_assert(condition, text)


def origin_of(environment: Any, symbol: Any) -> str | None:
    """The line of user code whose value `symbol` is; None if torch does not tell."""
    stack = environment.var_to_stack.get(symbol)
    return None if stack is None else _line(stack)


def is_float(symbol: Any) -> bool:
    """Whether an unbacked symbol stands for a floating-point number."""
    is_type = private("torch.utils._sympy.symbol", "symbol_is_type")
    return bool(is_type(symbol, private("torch.utils._sympy.symbol", "SymT").UNBACKED_FLOAT))


@contextlib.contextmanager
def keep_items() -> Iterator[None]:
    """Keep each `.item()` in a trace though no node reads it, since a promise may be about it.

    Operators whose sizes depend on values are kept, too.
    """
    unread = private("torch.fx.node", "_side_effectful_functions")
    with contextlib.ExitStack() as stack:
        for op in _READERS:
            stack.enter_context(patched(unread, op, op, where="_side_effectful_functions"))
        yield


_OF_FLOATS = (*("eq", "ne", "lt", "le", "gt", "ge"), *("add", "sub", "mul", "mod"))
"""Operators of torch's symbols whose results algebra may simplify."""


@contextlib.contextmanager
def refuse_lost_floats() -> Iterator[None]:
    """Refuse operators on symbolic floats whose result no longer depends on them.

    Algebra makes a constant of `v != v`, `v - v` and `v == v + 1`, which NaN, infinity and rounding
    make of other values.
    """
    node = private("torch.fx.experimental.sym_node", "SymNode")
    with contextlib.ExitStack() as stack:
        for name in _OF_FLOATS:
            refusing = _refusing(getattr(node, name))
            stack.enter_context(patched(node, name, refusing, where=f"SymNode.{name}"))
        yield


def _refusing(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(one: Any, other: Any) -> Any:
        result = method(one, other)
        given = one.expr.free_symbols | other.expr.free_symbols
        if any(map(is_float, filter(is_unbacked, given - result.expr.free_symbols))):
            raise CaptureError(
                f"the forward computes {method.__name__} of {one.expr} and {other.expr}, numbers "
                "read off a floating-point tensor; in a trace they are exact, so the result is a "
                "constant, where NaN, infinity and rounding give another. Ask the tensor, as by "
                "torch.isnan or torch.isfinite"
            )
        return result

    return checked


def drop_unread_items(
    graph: fx.Graph, environment: Any, decided: Collection[Any], guessed: Collection[Any]
) -> list[str]:
    """Erase the nodes of `keep_items` that nothing reads and no promise is about.

    A number folded to a constant is among them, and those that code `decided` by, but not those
    that a guess is about. Gives the lines that read the others, which may have printed or stored
    them.
    """
    promised = {s for promise in promises(environment, {}) for s in promise.condition.free_symbols}
    promised.update(guessed)
    unread = [
        node
        for node in graph.nodes
        if node.target in _READERS
        and not node.users
        and promised.isdisjoint(raw_symbols(node.meta.get("val")))
    ]
    lines = []
    for node in unread:
        for symbol in raw_symbols(node.meta.get("val")) if node.target is ITEM else ():
            line = origin_of(environment, symbol)
            known = symbol in environment.replacements or symbol in decided
            if not known and line is not None:
                lines.append(line)
        graph.erase_node(node)
    if unread:
        with keep_items():
            graph.eliminate_dead_code()
    return list(dict.fromkeys(lines))
