"""Symbolic sizes: the symbols of a program, the guards on them, and their text.

A size named in `dynamic` is one symbol in the whole program. If the model's code or an operator
decides by it (a comparison, a broadcast, a divisibility test), the decision becomes a guard. The
program is valid for exactly the calls whose sizes fulfil all guards. Capture may also decide
by values computed from constants of such sizes, for example whether a mask built by arange is
causal. These answers are computed again for the sizes of each call.

Sizes that depend on the values of tensors are symbols too; see above.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import CodeType
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from graphshard.errors import FixedSizeError, PassError, SizeCheckError, user_line_of
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import unbacked
from graphshard.torch_private.compat import SYMBOLIC, same_sizes

_ADMITTED = 4096  # results of checks that are cached, one for each tuple of sizes


@dataclass(frozen=True)
class Size:
    """One symbol, and the dimension (or stride) of an input that holds its value in a call."""

    name: str
    symbol: Any  # torch's
    value: torch.SymInt = field(compare=False)
    input: int
    dim: int
    is_stride: bool = False
    others: tuple[tuple[int, int], ...] = ()  # more (input, dim) of the same size

    def of(self, tensors: Sequence[Tensor]) -> int:
        """Its value for the tensors of a call."""
        tensor = tensors[self.input]
        return tensor.stride(self.dim) if self.is_stride else tensor.shape[self.dim]


class Guards(list[Any]):
    """The guards of a ShapeEnv, each with the line of user code that caused it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str | None] = []

    def append(self, guard: Any) -> None:
        """Add `guard`, with the line of user code that is running."""
        self.lines.append(user_line_of(traceback.extract_stack()))
        super().append(guard)


@dataclass(frozen=True)
class Answer:
    """A value that capture decided by, computed from constants of symbolic sizes."""

    evaluate: Callable[[Callable[[Any], Any]], Any]  # takes a function from sizes to numbers
    value: Any


class _Assumed(dict[Any, Any]):
    """By symbol, the value that stands for it where none is known, as in an estimate.

    For a size that depends on values this is its bound, or else `largest`.
    """

    environment: Any
    largest = 1

    def __missing__(self, symbol: Any) -> Any:
        if unbacked.is_float(symbol):
            return 1.0
        bound = unbacked.upper_bound(self.environment, symbol)
        return self.largest if bound is None else bound


class Sizes:
    """The symbolic sizes of one program and all assumptions on them.

    Args:
        largest: the largest dimension of an input, which estimates take for a size that depends on
            values and has no bound.
    """

    def __init__(self, largest: int = 1) -> None:
        self.guards = Guards()
        self.names: dict[Any, Any] = {}  # the user's names by torch's symbols
        assumed = _Assumed()
        self.environment = torch_compat.shape_environment(self.guards, self.names, assumed)
        assumed.environment, assumed.largest = self.environment, largest
        self.assumed = assumed
        self.by_values: tuple[ValueSize, ...] = ()
        self.of_last_run: dict[Any, Any] = {}  # by a symbol of the run before it
        self.answers_if_empty: dict[Any, str | None] = {}  # by condition, the line that asks
        self._as_if_empty = False
        self._runs: list[int] = []  # the symbols that there were before each run
        self.unread: list[str] = []  # lines that ask for a number which no node reads
        self.asked: set[Any] = set()  # symbols that a decision was about, whose lines do not count
        self.of_slices: set[Any] = set()  # what torch promises about a slice that it makes
        self.guesses: list[Guess] = []
        # During a trace: whether a condition is true of each call that the program will serve.
        self.is_true_of_calls: Callable[[Any], bool] | None = None
        self.symbols: tuple[Size, ...] = ()
        self.answers: list[Answer] = []
        self._closed_at = -1
        self._fulfils: Callable[..., tuple[Any, ...]] | None = None
        self._admitted: dict[tuple[int, ...], bool] = {}
        self._evaluators: dict[Any, Callable[..., tuple[Any, ...]]] = {}  # by a size's expression

    def new(self, name: str, hint: int, **place: Any) -> torch.SymInt:
        """Create a symbol for a size of at least 2; `place` holds further fields of `Size`."""
        value = torch_compat.new_size(self.environment, name, hint)
        symbol = torch_compat.size_expression(value)
        self.names[symbol] = sympy.Symbol(name, positive=True, integer=True)
        self.assumed[symbol] = hint
        self.symbols += (Size(name, symbol, value, **place),)
        return value

    def add_by_values(self, symbol: Any, source: str, where: str) -> None:
        """Name the number that the node `source` of module `where` reads off values."""
        taken = {*(size.name for size in self.symbols), *(v.name for v in self.by_values)}
        letter = "f" if unbacked.is_float(symbol) else "u"
        name = next(n for i in count() if (n := f"{letter}{i}") not in taken)
        self.names[symbol] = sympy.Symbol(name)
        bound = unbacked.upper_bound(self.environment, symbol)
        self.assumed[symbol] = self.assumed[symbol]
        size = ValueSize(name, symbol, source, where, bound, self.assumed[symbol])
        self.by_values += (size,)

    @property
    def assumed_by_values(self) -> dict[str, int]:
        """The value that estimates take for each size that depends on values, by its name."""
        return {
            size.name: size.assumed for size in self.by_values if not unbacked.is_float(size.symbol)
        }

    # -- runs of a trace ----------------------------------------------------------------------

    def begin_run(self) -> None:
        """Note that the trace runs the model now; it does so twice, each time with new symbols.

        What the model promised in an earlier run is dropped.
        """
        self._runs.append(len(unbacked.all_symbols(self.environment)))
        unbacked.forget_promises(self.environment)

    @contextmanager
    def traced(self, decide: Callable[[Any], Any], *, empty: bool | None) -> Iterator[None]:
        """Keep in a trace what the sizes need.

        decide: answers a condition on numbers that depend on values; None if it has no answer.
        empty: answers whether sizes that depend on values are 0.
        """
        self._as_if_empty = empty is True

        def answer(condition: Any) -> Any:
            answer = decide(condition)
            return self._answer_if_empty(condition, empty) if answer is None else answer

        with (
            unbacked.keep_items(),
            unbacked.refuse_lost_floats(),
            unbacked.answering(self.environment, answer),
        ):
            yield

    def _answer_if_empty(self, condition: Any, empty: bool | None) -> Any:
        """Answer a question whether a size is 0 by `empty`, and promise the answer."""
        answer = None if empty is None else unbacked.asks_if_empty(condition)
        if answer is None or not condition.free_symbols <= self.environment.size_like:
            return None
        answer = answer is not empty
        promised = condition if answer else sympy.Not(condition)
        unbacked.promise(self.environment, promised)
        self.answers_if_empty.setdefault(promised, user_line_of(traceback.extract_stack()))
        return sympy.sympify(answer)

    @property
    def not_empty(self) -> dict[str, str]:
        """The conditions under which the trace took its way, with the line that asks for each."""
        return {
            expression_text(condition, self.names): without_folder(line)
            for condition, line in self.answers_if_empty.items()
            if condition.free_symbols <= self.names.keys()
        }

    def note_slice(self, operands: Any, result: Tensor) -> None:
        """Note what torch promised just now about the new symbols of a slice of `operands`."""
        new = {*unbacked.raw_symbols((*result.shape, result.storage_offset()))}
        for each in tree_leaves(operands):
            parts = (*each.shape, each.storage_offset()) if isinstance(each, Tensor) else (each,)
            new -= {*unbacked.raw_symbols(parts)}
        self.of_slices |= {
            promise.condition
            for promise in unbacked.promises(self.environment, {})
            if promise.condition.free_symbols & new
        }

    def equate_runs(self) -> None:
        """Read each symbol of the last run but one as its counterpart in the last run."""
        if len(self._runs) < 2:
            return
        begin, end = self._runs[-2:]
        symbols = unbacked.all_symbols(self.environment)
        self.of_last_run = dict(zip(symbols[begin:end], symbols[end:], strict=False))
        unbacked.equate(self.environment, self.of_last_run)

    def promises(self) -> Iterator[unbacked.Promise]:
        """The assumptions of the model about sizes that depend on values.

        Not that sizes are 0, if the trace took them to be so: it never runs.
        """
        for promise in unbacked.promises(self.environment, self.of_last_run):
            if not (self._as_if_empty and promise.condition in self.answers_if_empty):
                yield promise

    # -- assumptions --------------------------------------------------------------------------

    def close_guards(self, paths: Sequence[str]) -> None:
        """Close the list of guards: from here on no code may decide by a symbolic size.

        Args:
            paths: the user's names of the inputs, for errors.
        """
        self.require_free(paths)
        self._closed_at = len(self.guards)
        self._fulfils = self.evaluator([sympy.And(*(g.expr for g in self.guards))])

    def require_free(self, paths: Sequence[str]) -> None:
        """Check that no decision so far fixes a size."""
        for size in self.symbols:
            number = torch_compat.size_expression(size.value)
            if number.is_number and not size.is_stride:
                dim_text = f"dim {size.dim} of {paths[size.input]} ({size.name})"
                raise FixedSizeError(self._fixed_size_text(size, number, dim_text), size.name)

    def require_closed(self, who: str) -> None:
        """Check that no guard was added since `close_guards`."""
        if len(self.guards) != self._closed_at:
            raise PassError(
                f"pass {who} decided by a symbolic size ({self._text(self._closed_at)}), which "
                "holds for some calls of the program and not for others; compare sizes by "
                "graphshard.torch_private.compat.same_sizes, or take "
                "graphshard.program.sizes.hint of them"
            )

    def drop_later_guards(self) -> None:
        """Forget the guards that were added since `close_guards`."""
        del self.guards[self._closed_at :], self.guards.lines[self._closed_at :]

    def _fixed_size_text(self, size: Size, number: Any, dim_text: str) -> str:
        line = where = None
        for guard, at in zip(self.guards, self.guards.lines, strict=True):
            if size.symbol in guard.expr.free_symbols:
                line, where = guard.expr, at
                if isinstance(guard.expr, sympy.Eq):
                    break
        reason = f", by {expression_text(line, self.names)}" if line is not None else ""
        at = f"\n  at {where}" if where else ""
        return (
            f"{dim_text} is to be dynamic, but the model fixes it to {number}{reason}; "
            "leave it out of dynamic, have the model take any size there (len(x) and "
            "int(x.shape[0]) fix a size, x.shape[0] does not), or, if it takes others than this, "
            f"capture with an example of another size{at}"
        )

    # -- calls --------------------------------------------------------------------------------

    def values(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The sizes of a call, in the order of `symbols`."""
        return tuple([size.of(tensors) for size in self.symbols])

    def admits(self, values: tuple[int, ...]) -> bool:
        """Whether the program is valid for a call of these sizes."""
        admitted = self._admitted.get(values)
        if admitted is None:
            if len(self._admitted) >= _ADMITTED:
                self._admitted.clear()
            admitted = self._admitted[values] = self._check(values)
        return admitted

    def _check(self, values: tuple[int, ...]) -> bool:
        assert self._fulfils is not None
        if min(values, default=2) < 2 or not self._fulfils(*values)[0]:
            return False
        return not any(self._differs(answer, values) for answer in self.answers)

    def broken(self, values: tuple[int, ...]) -> str:
        """Describe the sizes of a call and the guards that they break."""
        broken = [
            index
            for index, guard in enumerate(self.guards)
            if not self.evaluator([guard.expr])(*values)[0]
        ]
        texts = [self._text(index) for index in broken]
        if not texts:
            texts = ["a value computed from sizes alone to be what it was"]
        called = ", ".join(f"{s.name}={v}" for s, v in zip(self.symbols, values, strict=True))
        return f"{called} (the last program needs {'; '.join(dict.fromkeys(texts))})"

    def _text(self, index: int) -> str:
        line = self.guards.lines[index]
        text = expression_text(self.guards[index].expr, self.names)
        return text + (f", at {line}" if line else "")

    def _differs(self, answer: Answer, values: tuple[int, ...]) -> bool:
        try:
            now = answer.evaluate(self.numbers(values))
        except Exception:  # too large, or an error of the model's code, which capture reports
            return True
        return bool(now != answer.value or type(now) is not type(answer.value))

    def numbers(self, values: tuple[int, ...]) -> Callable[[Any], Any]:
        """Gives the value of each symbolic size in a call of the sizes `values`."""

        def number(size: Any) -> Any:
            expression = torch_compat.number_or_expression(size)
            if expression not in self._evaluators:
                self._evaluators[expression] = self.evaluator([expression])
            return self._evaluators[expression](*values)[0]

        return number

    def evaluator(
        self, expressions: Sequence[Any], more: Iterable[Any] = ()
    ) -> Callable[..., tuple[Any, ...]]:
        """Compile a function from `values(...)` to the values of sizes, numbers or expressions.

        The values of the symbols in `more` follow `values(...)` as arguments.
        """
        symbols = ", ".join(symbol.name for symbol in (*(s.symbol for s in self.symbols), *more))
        results = "".join(
            f"{torch_compat.python_of_sizes(torch_compat.number_or_expression(e))}, "
            for e in expressions
        )
        function: Callable[..., tuple[Any, ...]] = eval(
            f"lambda {symbols}: ({results})", torch_compat.size_functions()
        )
        return function

    # -- text ---------------------------------------------------------------------------------

    def header(self, paths: Sequence[str]) -> list[str]:
        """Lines for a dump: each size and its dimensions, then the guards."""
        lines = []
        for size in self.symbols:
            places = [(size.input, size.dim), *size.others]
            kind = "stride" if size.is_stride else "dim"
            dims = ", ".join(f"{kind} {dim} of {paths[index]}" for index, dim in places)
            lines.append(f"size {size.name}: {dims}; at least 2")
        lines += [str(size) for size in self.by_values if not unbacked.is_float(size.symbol)]
        texts = dict.fromkeys(expression_text(g.expr, self.names) for g in self.guards)
        lines += [f"guard: {text}" for text in texts]
        if self.answers:
            lines.append(f"guard: {len(self.answers)} values made of sizes alone are as captured")
        return lines


def expression_text(expression: Any, names: Mapping[Any, Any]) -> str:
    """A sympy expression as Python in the user's names, such as "batch*seq"."""
    return torch_compat.python_of_sizes(expression.xreplace(dict(names)))


def without_folder(line: str | None) -> str:
    """A line of user code as `user_line` gives it, without the folder of its file."""
    path, colon, rest = (line or "a line of torch's").partition(":")
    return os.path.basename(path) + colon + rest


def size_text(size: Any) -> str:
    """A size as a dump shows it: "17", "seq", "batch*seq"."""
    if not isinstance(size, SYMBOLIC):
        return str(size)
    return expression_text(torch_compat.size_expression(size), torch_compat.size_names(size))


def hint(size: Any) -> Any:
    """The value of a size in the example call, or the assumed one, without adding a guard."""
    return torch_compat.size_hint(size)


def number_of(size: Any, numbers: dict[Any, int], observed: int | None) -> Any:
    """Evaluate `size` with the values of symbols in `numbers`.

    A bare symbol without a value gets the value `observed`, which is added to `numbers`. An
    expression with a symbol without a value evaluates to `observed`.
    """
    if not isinstance(size, SYMBOLIC):
        return size
    expression = torch_compat.size_expression(size)
    if expression.is_symbol and observed is not None:
        return numbers.setdefault(expression, observed)
    if not expression.free_symbols <= numbers.keys():
        return observed
    return int(expression.xreplace(numbers))


def contiguous_strides(shape: Sequence[Any]) -> list[Any]:
    """The strides of a contiguous tensor of `shape`; adds no guard."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size if not isinstance(size, int) or size else step
    return strides


def is_contiguous(value: Tensor) -> bool:
    """As `Tensor.is_contiguous`, but adds no guard on symbolic sizes."""
    if any(isinstance(size, SYMBOLIC) for size in (*value.shape, *value.stride())):
        return same_sizes(value.stride(), contiguous_strides(value.shape))
    return value.is_contiguous()


def is_size(node: fx.Node) -> bool:
    """Whether a node's value is a symbolic size or a number computed from sizes."""
    return isinstance(node.meta.get("val"), SYMBOLIC)


@dataclass(frozen=True)
class ValueSize:
    """A number that an operator reads off values.

    `symbol` is torch's, `source` the name of the node that computes it, `where` the FQN of the
    module it came from. It is at most `bound`, if anybody knows; estimates take `assumed` for it.
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


class Guess(NamedTuple):
    """A condition that a trace took to be as `answer` says, and the user's line that asks."""

    condition: Any
    answer: bool
    line: str | None


class WrongGuessError(Exception):
    """The forward that runs is that of other answers to its model's questions than this call's.

    number: of the first guess that is wrong on this rank; None if it is on others only.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__(number)
        self.number = number


def check_sizes(
    condition: str,
    line: str | None,
    numbers: Mapping[str, Any],
    guess: int | None = None,
    answer: bool = True,
) -> None:
    """Check `condition`, Python over the names in `numbers`, which the user's `line` states.

    guess: the number of a condition that the trace guessed to be as `answer` says.
    """
    if bool(eval(_compiled(condition), _functions(), dict(numbers))) is not answer:
        if guess is not None:
            raise WrongGuessError(guess)
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
