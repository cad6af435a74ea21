"""Operators that a question about values skips, as a random draw skips a layer in LayerDrop.

A graph cannot skip them. If the answers change nothing but which operators run, the program runs
them in every call, and `torch.where` leaves out what they give where eager skips them. The forward
runs on fake tensors first, with some answers and with others: what its runs call, and with which
tensors, tells which operators each answer skips, and which tensor then stands for which.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphshard.capture.host_draws import restore_random_state
from graphshard.capture.structure import Structure
from graphshard.errors import CaptureError, user_line_here, warn_user
from graphshard.program.sizes import hint, without_folder
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.trace import storage_key
from graphshard.torch_private.unbacked import (
    ignore_new_symbols,
    is_float,
    raw_symbols,
    undecided_error,
)

_READS = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__)
_CASTS = (
    *(Tensor.to, Tensor.bool, Tensor.char, Tensor.byte, Tensor.short, Tensor.int, Tensor.long),
    *(Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double, Tensor.cpu, Tensor.cuda),
)
_KINDS = {func: kind[0] for kind in (_READS, _CASTS) for func in kind}
"""A functional tensor calls the first function of a kind for all of the kind."""

_RELATIONS = {
    sympy.StrictLessThan: torch.lt,
    sympy.LessThan: torch.le,
    sympy.StrictGreaterThan: torch.gt,
    sympy.GreaterThan: torch.ge,
    sympy.Equality: torch.eq,
    sympy.Unequality: torch.ne,
}

_MOST = 256
"""How many questions a run may ask."""

_PLAIN = (
    *(bool, int, float, str, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Structure),
)
"""Kinds of arguments that are the same if they are equal; others, if they are one object."""


class BothWaysError(CaptureError):
    """The answer to a question changes more than which operators run."""


@dataclass(frozen=True)
class _Name:
    """A tensor of a run: a result of a call, or the operand of the call that met it first."""

    call: int
    place: int
    is_result: bool


@dataclass(frozen=True, eq=False)
class _Call:
    """A call in a run of the model.

    given: the arguments that are no tensors.
    needs_grad: of the results, when the call had made them.
    written: operands that it changed.
    question: the number of the question that it asks, and the line that asks.
    """

    func: Any
    given: Sequence[Any]
    operands: Sequence[Tensor]
    results: Sequence[Tensor] = ()
    needs_grad: Sequence[bool] = ()
    written: Sequence[Tensor] = ()
    question: int | None = None
    line: str = ""

    def is_like(self, other: _Call) -> bool:
        """Whether it calls the same function with equal numbers and results of equal shapes."""
        return (
            self.func == other.func
            and self.question == other.question
            and len(self.operands) == len(other.operands)
            and len(self.given) == len(other.given)
            and all(map(_are_same, self.given, other.given))
            and [*map(_form, self.results)] == [*map(_form, other.results)]
        )


def _kind(func: Any) -> Any:
    return _KINDS.get(func, func)


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, SYMBOLIC) or type(one) is not type(other):
        return type(one) is type(other)  # a comparison would decide by a size
    return isinstance(one, _PLAIN) and bool(one == other)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(map(hint, tensor.shape)), tensor.dtype, tensor.device


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


class _Numbers(dict[Any, Tensor]):
    """The tensors that numbers are read off, by symbol."""

    def note(self, number: Any, tensor: Tensor) -> None:
        """Note that a number, if it is symbolic, is read off `tensor`."""
        self.update(dict.fromkeys(raw_symbols(number), tensor))

    def question(self, condition: Any) -> tuple[str, list[Tensor]] | None:
        """A condition as text that all runs share, and its tensors; None if one is not known."""
        free = condition.free_symbols
        if not free or not free <= self.keys():
            return None
        symbols = [symbol for symbol in self if symbol in free]
        names = {symbol: sympy.Symbol(f"n{place}") for place, symbol in enumerate(symbols)}
        return str(condition.xreplace(names)), [self[symbol] for symbol in symbols]

    def truth(self, condition: Any) -> Tensor:
        """A condition as a tensor; comparisons of numbers are those that Python would make."""
        if isinstance(condition, sympy.Not):
            return ~self.truth(condition.args[0])
        if isinstance(condition, (sympy.And, sympy.Or)):
            join = torch.logical_and if isinstance(condition, sympy.And) else torch.logical_or
            return reduce(join, map(self.truth, condition.args))
        relation = _RELATIONS.get(condition.func)
        if relation is None or not all(each.is_Symbol or each.is_Number for each in condition.args):
            raise BothWaysError("it asks about more than a number that is read off a tensor")
        return relation(*map(self._side, condition.args))

    def _side(self, expression: Any) -> Tensor:
        dtype = torch.float64 if expression.is_Float or is_float(expression) else torch.int64
        if expression.is_Number:
            number = int(expression) if expression.is_Integer else float(expression)
            return torch.scalar_tensor(number, dtype=dtype, device="cpu")
        return self[expression].reshape(()).to(dtype)


def _asks() -> None:
    """Stands for the function of a call that asks by a number."""


class _Run(TorchFunctionMode):
    """The calls in one run of the model, in which the questions get these answers."""

    def __init__(self, answer: Callable[[int], bool]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._answer = answer
        self._asked: dict[Any, int] = {}  # numbers, by tensor and its version, or by condition
        self._numbers = _Numbers()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        operands = _tensors(given)
        plain = [leaf for leaf in tree_flatten(given)[0] if not isinstance(leaf, Tensor)]
        before = [tensor._version for tensor in operands]
        try:
            result = func(*args, **(kwargs or {}))
        except undecided_error():
            if func is not Tensor.__bool__:
                raise
            return self._note_question((id(args[0]), args[0]._version), func, plain, operands)
        if func in _READS:
            self._numbers.note(result, args[0])
        written = [t for t, was in zip(operands, before, strict=True) if t._version != was]
        if (results := _tensors(result)) or written or func in _READS:
            needs_grad = [tensor.requires_grad for tensor in results]
            self.calls.append(_Call(func, plain, operands, results, needs_grad, written))
        return result

    def ask(self, condition: Any) -> Any:
        """Answer a question about numbers that were read off tensors; None if it is not one."""
        asked = self._numbers.question(condition)
        if asked is None:
            return None
        text, operands = asked
        return sympy.sympify(self._note_question(condition, _asks, [text], operands))

    def _note_question(
        self, asked: Any, func: Any, given: Sequence[Any], operands: Sequence[Tensor]
    ) -> bool:
        number = self._asked.setdefault(asked, len(self._asked))
        if number == _MOST:
            raise BothWaysError("a loop asks how often to go on") from None
        line = without_folder(user_line_here())
        self.calls.append(_Call(func, given, operands, question=number, line=line))
        return self._answer(number)

    def end(self, results: Sequence[Tensor], other: Sequence[Any]) -> None:
        """Note what the model returns, and what `other` things it changes."""
        self.calls.append(_Call(None, [*other], [*results]))

    def stretches(self) -> list[range]:
        """The calls before the first question, from there to the next one, and so on."""
        starts = [0]
        for place, call in enumerate(self.calls):
            if call.question == len(starts) - 1:
                starts.append(place)
        return [*map(range, starts, [*starts[1:], len(self.calls)])]

    def names(self) -> list[list[_Name]]:
        """The operands of each call."""
        names: dict[int, _Name] = {}
        operands = []
        for number, call in enumerate(self.calls):
            for place, tensor in enumerate(call.operands):
                names.setdefault(id(tensor), _Name(number, place, False))
            operands.append([names[id(tensor)] for tensor in call.operands])
            for place, tensor in enumerate(call.results):
                names[id(tensor)] = _Name(number, place, True)
        return operands

    def tensor(self, name: _Name) -> Tensor:
        """The tensor of this name."""
        call = self.calls[name.call]
        return (call.results if name.is_result else call.operands)[name.place]


class _Skips:
    """What the answers skip, found by comparing runs with the one that skips nothing.

    operands: of each call of that run.
    stands_for: for a tensor that skipped operators give, the number of the question, and the
        tensor that the code goes on with where they are skipped.
    segments: the calls that the answers skip, by question.
    """

    def __init__(self, whole: _Run) -> None:
        self.whole = whole
        self.stands_for: dict[_Name, tuple[int, _Name]] = {}
        self.segments: dict[int, range] = {}
        self.operands = whole.names()
        self._stretches = whole.stretches()
        self._inputs = {
            id(whole.tensor(name)): name
            for names in self.operands
            for name in names
            if not name.is_result
        }

    def lines(self) -> dict[str, int]:
        """The lines that ask, with how many questions."""
        return Counter(self.whole.calls[stretch.start].line for stretch in self._stretches[1:])

    def learn(self, other: _Run, skipped: set[int]) -> None:
        """Learn from a run in which the questions `skipped` skip what they can."""
        segments = self._segments(other, skipped)
        self.segments |= {question: segments[question] for question in skipped}
        for name, instead in self._pairs(other, segments):
            if instead == self._resolved(name, skipped):
                continue
            question = next((n for n, calls in segments.items() if name.call in calls), None)
            if question is None or name in self.stands_for or instead.call > name.call:
                raise BothWaysError("its answer changes tensors that no skipped operator made")
            if _form(self.whole.tensor(name)) != _form(self.whole.tensor(instead)):
                raise BothWaysError("its answer changes the shape, dtype or device of a tensor")
            for each in (name, instead):
                if each.is_result and self._is_of_function(each):
                    raise BothWaysError("its answer changes the result of an autograd.Function")
            self.stands_for[name] = question, instead

    def check(self, other: _Run, skipped: set[int]) -> None:
        """Check that this is how a run goes in which the questions `skipped` skip what they can."""
        for name, instead in self._pairs(other, self._segments(other, skipped)):
            if instead != self._resolved(name, skipped):
                raise BothWaysError("its answer and that to another question depend on each other")

    def check_writes(self) -> None:
        """Check that no skipped operator writes what others have, nor others what it gives."""
        calls = self.whole.calls
        for segment in self.segments.values():
            before = {
                storage_key(tensor)
                for call in calls[: segment.start]
                for tensor in (*call.operands, *call.results)
            }
            made: set[int] = set()
            for call in calls[segment.start : segment.stop]:
                if any(storage_key(tensor) not in made for tensor in call.written):
                    raise BothWaysError("operators that its answer skips write in place")
                made |= {*map(storage_key, call.results)} - before
        for name, (_, instead) in self.stands_for.items():
            call = calls[name.call]
            is_written = any(self.whole.tensor(name) is tensor for tensor in call.written)
            later = calls[max(name.call, instead.call) + 1 :]
            ends = {*map(storage_key, map(self.whole.tensor, (name, instead)))}
            writes = any(storage_key(t) in ends for each in later for t in each.written)
            if writes or is_written:
                raise BothWaysError("what its answer skips is written in place")

    def _is_of_function(self, name: _Name) -> bool:
        """Whether a result got its gradient later than the call made it."""
        made_so = self.whole.calls[name.call].needs_grad[name.place]
        return self.whole.tensor(name).requires_grad != made_so

    def _segments(self, other: _Run, skipped: set[int]) -> dict[int, range]:
        """The calls that another run leaves out, by question."""
        segments = {}
        stretches = other.stretches()
        if len(stretches) != len(self._stretches):
            raise BothWaysError("the answer to one question changes which are asked later")
        for question, (here, there) in enumerate(zip(self._stretches, stretches, strict=True), -1):
            calls = self.whole.calls[here.start : here.stop]
            others = other.calls[there.start : there.stop]
            left_out = len(calls) - len(others)
            if left_out < 0 or (left_out and question not in skipped):
                raise BothWaysError("its answer changes which operators run after other questions")
            pairs = zip(reversed(calls), reversed(others), strict=False)
            alike = len([*takewhile(lambda pair: pair[0].is_like(pair[1]), pairs)])
            begin = max(len(others) - alike, min(1, len(others)))
            if not all(map(_Call.is_like, calls[:begin], others[:begin])):
                raise BothWaysError("each of its answers runs operators of its own")
            segments[question] = range(here.start + begin, here.start + begin + left_out)
        return segments

    def _pairs(self, other: _Run, segments: Mapping[int, range]) -> Iterator[tuple[_Name, _Name]]:
        """Each operand of the calls of both runs: its name, and the name of what is there."""
        left_out = {place for segment in segments.values() for place in segment}
        kept = [place for place in range(len(self.whole.calls)) if place not in left_out]
        for place, there, call in zip(kept, other.names(), other.calls, strict=True):
            for name, theirs, tensor in zip(
                self.operands[place], there, call.operands, strict=True
            ):
                if theirs.is_result:
                    yield name, _Name(kept[theirs.call], theirs.place, True)
                elif id(tensor) in self._inputs:
                    yield name, self._inputs[id(tensor)]
                else:
                    raise BothWaysError("the model makes tensors by other means than operators")

    def _resolved(self, name: _Name, skipped: set[int]) -> _Name:
        while name in self.stands_for and self.stands_for[name][0] in skipped:
            name = self.stands_for[name][1]
        return name


class _Applied(TorchFunctionMode):
    """Computes both ways in a trace: in place of a tensor that is skipped gives the right one."""

    def __init__(self, skips: _Skips, skipping: Sequence[bool]) -> None:
        super().__init__()
        self._calls = skips.whole.calls
        self._operands = skips.operands
        self._stands_for = skips.stands_for
        self._skipped = {
            call: (question, segment.start)
            for question, segment in skips.segments.items()
            for call in segment
        }
        self._skipping = skipping
        self._needed = {name for _, name in skips.stands_for.values()}
        self._tensors: dict[_Name, Tensor] = {}
        self._asked: dict[int, Tensor] = {}
        self._numbers = _Numbers()
        self._is_asked = False
        self._at = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_asked:
            return func(*args, **(kwargs or {}))
        call = self._calls[self._at]
        is_planned = _kind(func) == _kind(call.func)
        if is_planned and func in _READS:
            self._at += 1
            if call.question is None:
                result = func(*args)
                self._numbers.note(result, args[0])
                return result
            if call.question not in self._asked:  # its values now, whatever is written to it later
                self._asked[call.question] = args[0].reshape(()).ne(0)
            return not self._skipping[call.question]
        at = self._at
        given, structure = tree_flatten((args, kwargs or {}))
        operands = [leaf for leaf in given if isinstance(leaf, Tensor)]
        is_planned = is_planned and len(operands) == len(self._operands[at])
        if is_planned and at in self._skipped:
            args, kwargs = tree_unflatten(self._gated(at, given), structure)
        leaves, structure = tree_flatten(func(*args, **(kwargs or {})))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not is_planned:
            if places:
                raise BothWaysError("two runs of the forward call different operators")
            return tree_unflatten(leaves, structure)
        self._at += 1
        self._keep(at, operands, is_result=False)
        for number, place in enumerate(places):
            if (name := _Name(at, number, True)) in self._stands_for:
                leaves[place] = self._chosen(leaves[place], *self._stands_for[name])
        self._keep(at, [leaves[place] for place in places], is_result=True)
        return tree_unflatten(leaves, structure)

    def ask(self, condition: Any) -> Any:
        """Answer the question that is next in the plan."""
        asked = self._numbers.question(condition)
        if asked is None:
            return None
        call = self._calls[self._at]
        if call.question is None or (call.func, call.given) != (_asks, [asked[0]]):
            raise BothWaysError("two runs of the forward ask differently")
        self._at += 1
        if call.question not in self._asked:
            self._is_asked = True
            self._asked[call.question] = self._numbers.truth(condition)
            self._is_asked = False
        return sympy.sympify(not self._skipping[call.question])

    def _gated(self, at: int, given: Sequence[Any]) -> list[Any]:
        """What a skipped operator is given, with zeros for gradients where it is skipped.

        Its backward may make NaN of zeros, as that of a division by a norm of 0 does.
        """
        question, start = self._skipped[at]
        asked = self._asked[question]
        is_skipped = asked if self._skipping[question] else ~asked
        names = iter(self._operands[at])
        gated = []
        for leaf in given:
            if isinstance(leaf, Tensor):
                name = next(names)
                is_outside = not name.is_result or name.call < start
                if is_outside and leaf.requires_grad and torch.is_grad_enabled():
                    leaf = torch.ops.graphshard.gate(leaf, is_skipped.to(leaf.device))
            gated.append(leaf)
        return gated

    def _keep(self, at: int, tensors: Sequence[Tensor], *, is_result: bool) -> None:
        for place, tensor in enumerate(tensors):
            if (name := _Name(at, place, is_result)) in self._needed:
                self._tensors[name] = tensor

    def _chosen(self, whole: Tensor, question: int, instead: _Name) -> Tensor:
        asked = self._asked[question].to(whole.device)
        skipped = self._tensors[instead]
        ways = (skipped, whole) if self._skipping[question] else (whole, skipped)
        return torch.where(asked, *ways)

    def end(self, results: Sequence[Tensor], other: Sequence[Any]) -> None:
        """Check that the run ends here."""
        if self._at != len(self._calls) - 1:
            raise BothWaysError("two runs of the forward call different operators")


class BothWays:
    """Finds what the answers to questions about values skip, and lets a trace compute both ways.

    wanted: whether it does.
    notes: say which lines ask, and what the program does instead.
    """

    def __init__(self, *, wanted: bool = False) -> None:
        self.notes: list[str] = []
        self.wanted = wanted
        self._make: Callable[[], _Run | _Applied] | None = None
        self._now: _Run | _Applied | None = None

    def find(self, forward: Callable[[], Any], mode: Any) -> None:
        """If it is wanted, run `forward` with several answers; later runs compute both ways.

        Args:
            forward: runs the model.
            mode: of the fake tensors that it gets.

        Raises:
            BothWaysError: If the answers change more than which operators run.
        """
        if not self.wanted:
            return

        def run(answer: Callable[[int], bool]) -> _Run:
            made = _Run(answer)
            self._make = lambda: made
            with restore_random_state(), mode, ignore_new_symbols(mode.shape_env):
                forward()
            return made

        never = run(lambda _: False)
        if len(never.stretches()) == 1:
            self._make = None  # nothing asks
            return
        always = run(lambda _: True)
        no, yes = ([*map(len, each.stretches())][1:] for each in (never, always))
        skipping = [without > with_it for without, with_it in zip(no, yes, strict=False)]
        every, even = {*range(len(skipping))}, {*range(0, len(skipping), 2)}

        def skip(skipped: set[int]) -> _Run:
            return run(lambda n: n < len(skipping) and skipping[n] is (n in skipped))

        skips = _Skips(skip(set()))
        # Where every second one skips, the operators of the next take what stands for the skipped.
        first = {*range(len(skipping) // 2)}
        subsets = (even, every - even, every, first, every - first)
        runs = [(skipped, skip(skipped)) for skipped in subsets]
        for skipped, other in runs[:2]:
            skips.learn(other, skipped)
        for skipped, other in runs:
            skips.check(other, skipped)
        skips.check_writes()
        self.notes = [
            f"{line} asks {count} times: what eager skips by the answer runs in every call, and "
            "torch.where leaves out its results"
            for line, count in skips.lines().items()
        ]
        warn_user(
            "operators that the forward skips at times run in every call, and the gradients of "
            "their parameters are zeros then. Where eager skips them on all ranks, gradients are "
            "None, and AdamW leaves alone what it moves here by its momentum:\n  "
            + "\n  ".join(skips.lines())
        )
        self._make = lambda: _Applied(skips, skipping)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Watch one run of the model, or let it compute both ways."""
        if self._make is None:
            yield
            return
        self._now = self._make()
        with self._now:
            yield

    def ask(self, condition: Any) -> Any:
        """The answer to a question about numbers that a run reads off tensors, or None."""
        return None if self._now is None else self._now.ask(condition)

    def end(self, results: Sequence[Tensor], other: Sequence[Any]) -> None:
        """Note what the run returns, and what `other` things it changes."""
        if self._now is not None:
            self._now.end(results, other)


# -- gradients ------------------------------------------------------------------------------------

_library = torch.library.Library("graphshard", "FRAGMENT")
_library.define("gate(Tensor x, Tensor is_skipped) -> Tensor")

GATE = torch.ops.graphshard.gate.default
"""Gives its first argument, whose gradient is zeros if the second is true; it is no node."""


@torch.library.impl(_library, "gate", "CompositeExplicitAutograd")
def _gate(x: Tensor, is_skipped: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("graphshard::gate", lib=_library)
def _gate_fake(x: Tensor, is_skipped: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


def _keep_skipped(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (is_skipped,) = ctx.saved_tensors
    return grad.masked_fill(is_skipped, 0), None


torch.library.register_autograd(
    "graphshard::gate", _gate_backward, setup_context=_keep_skipped, lib=_library
)
