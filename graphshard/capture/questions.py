"""Code that decides by the values of tensors.

Three kinds of such questions have an answer. If one answer raises an error, as in an `assert`, the
program goes the other way and checks it in each call. If that does not suffice, another trace lets
the call's inputs and buffers give answers, where they alone do. These are computed before each
call: a program serves the calls with its answers, as it serves those with its shapes. And where all
ordinary numbers give the same answer, as to "are all finite?", the trace guesses it; the last trace
guesses any. A call for which a guess is wrong runs again, by another program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from graphshard.capture.errors import IS_FALSE, IS_TRUE, question_text
from graphshard.capture.raising import raising_answer
from graphshard.capture.recipes import Leaf, Recipe, Recipes
from graphshard.errors import CaptureError, user_line_here
from graphshard.program.sizes import Guess, Sizes, expression_text, hint, without_folder
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private import unbacked
from graphshard.torch_private.compat import size_expression

_ORDINARY = (0.0, 1.0, 1e4, -1e4, None)
"""What stands for the numbers that a model computes: all are this one, or they go from -2 to 3."""

ASSUMES = "assumes that "
"""Begins the notes of a program on answers for which its example had no values."""

_USUAL = 3
"""What stands for integers among inputs without values: no padding, and in every vocabulary."""


_MOST = 256
"""How many answers a trace guesses."""


@dataclass(frozen=True)
class Question:
    """A condition on numbers read off tensors, and the answer that a program was captured with.

    text: the condition.
    line: the line that asks, without the folder of its file.
    """

    text: str
    line: str
    answer: Any
    condition: Any = field(repr=False)
    recipes: Mapping[Any, Recipe] = field(repr=False)  # by the symbol of the number
    evaluate: Callable[..., tuple[Any, ...]] = field(repr=False)  # of sizes and these numbers

    def statement(self, answer: Any) -> str:
        """What an answer to it says, and the line that asks."""
        said = f"{self.text} is {answer}"
        if answer is True:
            said = self.text
        elif answer is False:
            is_truth = self.text == IS_TRUE
            said = IS_FALSE if is_truth else expression_text(sympy.Not(self.condition), {})
        return f"{said}, at {self.line}"

    def answer_for(
        self, sizes: Sizes, tensors: Sequence[Tensor], buffer: Callable[[str], Tensor]
    ) -> Any:
        """The answer if the call's inputs are `tensors`; None if it cannot be computed.

        buffer: gives a buffer by its FQN.
        """

        def value_of(leaf: Leaf) -> Tensor:
            return buffer(leaf.key) if isinstance(leaf.key, str) else tensors[leaf.key]

        return self.answer_of(sizes, tensors, value_of)

    def answer_of(
        self, sizes: Sizes, tensors: Sequence[Tensor], value_of: Callable[[Leaf], Tensor]
    ) -> Any:
        """As `answer_for`, with the tensors that `value_of` gives."""
        values = sizes.values(tensors)
        number = sizes.numbers(values)
        try:
            numbers = [recipe.item(number, value_of) for recipe in self.recipes.values()]
            return self.evaluate(*values, *numbers)[0]
        except Exception:  # too large, or an error of the model's code, which capture reports
            return None


def _is_number(condition: Any) -> bool:
    return not (condition.is_Relational or condition.is_Boolean)


class Questions:
    """Answers the questions of one trace.

    Args:
        sizes: of the trace.
        tensors: the inputs of the example, which may have no values.
        paths: the user's names of the inputs.
        buffer: gives a buffer by its FQN, which may have no values.
        recipes: of the trace; None if inputs, buffers and ordinary numbers may give no answers.
        known: the answers to the first conditions that the trace would guess.

    draws: the numbers of inputs that answer no conditions.
    otherwise: answers conditions that nothing else does.
    guesses_all: it guesses every condition, and not only where ordinary numbers agree.
    guessed: the conditions that the trace guessed, in the order asked.
    """

    def __init__(
        self,
        sizes: Sizes,
        tensors: Sequence[Tensor],
        paths: Sequence[str],
        buffer: Callable[[str], Tensor],
        recipes: Recipes | None,
        known: Sequence[bool],
    ) -> None:
        self.asked: list[Question] = []
        self.guessed: list[Question] = []
        self.assumed: list[Question] = []  # those of them that the example has no values for
        self._sizes = sizes
        self._tensors = tensors
        self._paths = paths
        self._buffer = buffer
        self.recipes = recipes
        self.guesses_all = False
        self._known = known
        self.draws = range(0)
        self.otherwise: Callable[[Any], Any] = lambda condition: None
        sizes.is_true_of_calls = lambda condition: self._answered_by_call(condition) is sympy.true

    def begin_run(self) -> None:
        """Note that the trace runs the model now."""
        self._sizes.begin_run()
        self.asked, self.assumed, self.guessed, self._sizes.guesses = [], [], [], []

    def close(self) -> list[str]:
        """End the trace; gives what the program takes to be so, as notes."""
        self._sizes.close_guards(self._paths)
        self._sizes.is_true_of_calls = None  # which holds the example
        notes = []
        for question in self.asked:
            how = ASSUMES if question in self.assumed else "serves calls in which "
            notes.append(how + question.statement(question.answer))
        for question in self.guessed:
            statement = question.statement(question.answer)
            notes.append(f"{ASSUMES}{statement}; a call in which that is not so runs again")
        return [*dict.fromkeys(notes)]

    def decide(self, condition: Any) -> Any:
        """The answer to a question about unbacked symbols; None if there is none."""
        answer = self._answered_by_call(condition)
        if answer is not None or _is_number(condition):
            return answer
        wrong = raising_answer(sys._getframe())
        if wrong is not None:
            return self._promise(condition, answer=not wrong)
        question = self._question(condition)
        if question is not None and not self._is_of_draws(question):
            answers = {self._answer(question, ordinary) for ordinary in _ORDINARY}
            if len(answers) == 1 and None not in answers:
                return self._guess(condition, question, answers.pop())
        answer = self.otherwise(condition)
        if answer is None and self.guesses_all:
            question = question or self._new(condition, {})
            answer = self._guess(condition, question, self._answer(question) is True)
        if answer is not None:
            self._sizes.asked.update(condition.free_symbols)
        return answer

    def _guess(self, condition: Any, question: Question, likely: bool) -> Any:
        """The answer that is known, or else the `likely` one, which each call checks."""
        number = len(self.guessed)
        if number == _MOST:
            raise CaptureError(
                f"the forward decides {_MOST} times by what it computes, as a loop does that "
                "values end; bound the rounds of the loop, and skip by torch.where"
            )
        answer = self._known[number] if number < len(self._known) else likely
        self.guessed.append(replace(question, answer=answer))
        self._sizes.guesses.append(Guess(condition, answer, user_line_here()))
        if any(map(unbacked.is_float, condition.free_symbols)):
            return sympy.sympify(answer)  # of NaN neither a comparison nor its contrary is true
        return self._promise(condition, answer=answer, is_guess=True)

    def is_one(self, size: Any) -> bool:
        """Whether a size is 1; if nothing tells, the program checks that it is not."""
        if self.recipes is None or not unbacked.depends_on_values(size):
            return bool(size == 1)  # an error, where values tell: another trace asks them
        condition = sympy.Eq(size_expression(size), 1)
        if not condition.free_symbols:
            return bool(condition)
        answer = self.decide(condition)
        return bool(self._promise(condition, answer=False) if answer is None else answer)

    def _question(self, condition: Any) -> Question | None:
        """The question, without an answer, if it is known how its numbers are made."""
        symbols = sorted(filter(unbacked.is_unbacked, condition.free_symbols), key=str)
        if self.recipes is None or not self.recipes.numbers.keys() >= set(symbols):
            return None
        is_number = _is_number(condition)
        if is_number and any(map(unbacked.is_float, symbols)):
            return None  # it would hardly ever be the same
        return self._new(condition, {symbol: self.recipes.numbers[symbol] for symbol in symbols})

    def _new(self, condition: Any, recipes: Mapping[Any, Recipe]) -> Question:
        is_number, environment = _is_number(condition), self._sizes.environment
        asked = "the number" if is_number else question_text(condition, environment)
        line = without_folder(user_line_here())
        evaluate = self._sizes.evaluator([condition], recipes)
        return Question(asked, line, None, condition, recipes, evaluate)

    def _promise(self, condition: Any, *, answer: bool, is_guess: bool = False) -> Any:
        condition = condition if answer else sympy.Not(condition)
        unbacked.promise(self._sizes.environment, condition, is_guess=is_guess)
        return sympy.sympify(answer)

    def _answered_by_call(self, condition: Any) -> Any:
        """The answer that the call's inputs and buffers give, if they do; then it is a question."""
        question = self._question(condition)
        if question is None:
            return None
        if not all(recipe.is_of_call() for recipe in question.recipes.values()):
            return None
        if self._is_of_draws(question) and not _is_number(condition):
            return None
        answer = self._answer(question)
        if answer is None:
            return None
        leaves = {leaf for recipe in question.recipes.values() for leaf in recipe.leaves()}
        answered = replace(question, answer=answer)
        self.asked.append(answered)
        if not all(torch_trace.is_real(self._given(leaf)) for leaf in leaves):
            self.assumed.append(answered)
        self._sizes.asked.update(question.recipes)
        return sympy.sympify(answer)

    def _is_of_draws(self, question: Question) -> bool:
        recipes = question.recipes.values()
        return any(leaf.key in self.draws for recipe in recipes for leaf in recipe.leaves())

    def _answer(self, question: Question, ordinary: float | None = None) -> Any:
        def value_of(leaf: Leaf) -> Tensor:
            if leaf.key is not None and torch_trace.is_real(given := self._given(leaf)):
                return given
            shape = torch.Size(map(hint, leaf.shape))
            number = ordinary
            if leaf.key is not None:
                number = _USUAL if self._is_number(leaf) else 1
            if number is None:
                numbers = torch.linspace(-2, 3, shape.numel(), device=leaf.device)
                return numbers.view(shape).to(leaf.dtype)
            return torch.full(shape, number, dtype=leaf.dtype, device=leaf.device)

        return question.answer_of(self._sizes, self._tensors, value_of)

    def _given(self, leaf: Leaf) -> Tensor:
        key = leaf.key
        return self._buffer(key) if isinstance(key, str) else self._tensors[key]

    def _is_number(self, leaf: Leaf) -> bool:
        """Whether a leaf without values is an input of integers that is no mask."""
        is_exact = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        return is_exact and isinstance(leaf.key, int) and "mask" not in self._paths[leaf.key]
