"""A captured call: its program, and how arguments and results fit to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphshard.capture.guards import Guards
from graphshard.capture.host_draws import Draw, draw_ahead
from graphshard.capture.places import Argument, Assignment, Buffer, LeftAt, mark_left
from graphshard.capture.questions import Question
from graphshard.capture.structure import Structure
from graphshard.errors import CaptureError
from graphshard.program.program import Program

_NO_GUARDS = Guards()

MOST_ANSWERS = 64
"""The number of programs for calls that differ in what their values answer, and maybe else."""


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


@dataclass(frozen=True)
class Capture:
    """A captured program, and the structures of its inputs and of its result.

    left: places besides the result where forward leaves tensors, with the structure of the value
        there. These tensors are outputs of the program, behind those of the result.
    guards: the Python state that it was captured with.
    settled: attributes that forward sets from None to a plain value, as `config.problem_type` of
        transformers' classifiers; each call repeats it.
    questions: those about values that it answers for the calls it serves, in the order asked.
    draws: the numbers that each call draws on the host, as inputs behind its tensors.
    """

    program: Program
    inputs: Structure
    result: Structure
    left: tuple[tuple[LeftAt, Structure], ...] = ()
    guards: Guards = _NO_GUARDS
    settled: tuple[Assignment, ...] = ()
    questions: tuple[Question, ...] = ()
    draws: tuple[Draw, ...] = ()

    def answered_otherwise(
        self, tensors: Sequence[Tensor], buffer: Callable[[str], Tensor]
    ) -> tuple[Question, Any] | None:
        """The first question to which a call of `tensors` has another answer, and that answer."""
        sizes = self.program.sizes
        if self.questions:
            tensors = [*tensors, *draw_ahead(self.draws)]
        for question in self.questions:
            assert sizes is not None
            answer = question.answer_for(sizes, tensors, buffer)
            if answer != question.answer:
                return question, answer
        return None

    def settle(self) -> None:
        """Do what forward does to the attributes in `settled`."""
        for place, value in self.settled:
            if place.read() is None:
                place.write(value)

    def computes_as(self, other: Capture) -> bool:
        """Whether the two are known to be one program, with results of one structure."""
        mine, theirs = self.program, other.program
        return (
            mine.sizes is None
            and theirs.sizes is None
            and str(mine.graph) == str(theirs.graph)
            and mine.notes == theirs.notes
            and self.returns_as(other)
            and all(
                a.value is b.value or _equal(a.value, b.value)
                for a, b in zip(mine.buffers, theirs.buffers, strict=True)
            )
        )

    def returns_as(self, other: Capture) -> bool:
        """Whether the two return and leave values of one structure, in the same places."""
        places = [[(place.path, value) for place, value in each.left] for each in (self, other)]
        return self.result == other.result and places[0] == places[1]

    def leave(
        self, tensors: Sequence[Any], call: Any, set_buffer: Callable[[str, Tensor], None]
    ) -> None:
        """Put what forward leaves in Python state, the arguments `call` and buffers there.

        `tensors` are aligned with `program.outputs`.
        """
        end = len(self.result.paths)
        for place, structure in self.left:
            start, end = end, end + len(structure.paths)
            value = structure.build(tensors[start:end])
            if isinstance(place, Buffer):
                set_buffer(place.path, value)
            elif isinstance(place, Argument):
                place.add(call, value)
            else:
                place.write(value)
        for tensor in tensors[len(self.result.paths) :]:
            mark_left(tensor)


def refuse_more_answers(captures: Sequence[Capture], statement: str) -> None:
    """Refuse a call if its values answer a question and there are too many programs for others.

    statement: what the call's values say; "" if they answer as for the last capture.

    Raises:
        CaptureError: there are `MOST_ANSWERS` programs.
    """
    asking = sum(1 for captured in captures if captured.questions)
    if asking >= MOST_ANSWERS and statement:
        raise CaptureError(
            f"the model decides by the values of its inputs or buffers, and {asking} programs were "
            f"captured for as many answers, the most there may be. In this call {statement}. "
            "Compute what depends on it by tensor operators (a mask, torch.where), or make the "
            "number a Python argument of forward that takes few values"
        )
