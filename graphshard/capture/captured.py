"""A captured call: its program, and how arguments and results fit to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphshard.capture.guards import Guards
from graphshard.capture.host_draws import Draw, draw_ahead
from graphshard.capture.places import Argument, Assignment, Buffer, LeftAt, mark_left
from graphshard.capture.questions import Question
from graphshard.capture.side_effects import differs, warn_of_state
from graphshard.capture.structure import Structure
from graphshard.errors import CaptureError
from graphshard.program.program import Program

_NO_GUARDS = Guards()

MOST_ANSWERS = 64
"""The number of programs for calls that differ in what their values answer, and maybe else."""


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


@dataclass(frozen=True)
class Met:
    """How a trace met values, for another one of the same call.

    values: an item of `one_trace.Values`.
    draws: what it drew on the host, as `Example.draws`.
    compiling: whether `torch.compiler.is_compiling()` was true.
    answers: to the first questions that it guesses.
    """

    values: Any
    draws: Any
    compiling: bool
    answers: tuple[bool, ...] = ()

    @property
    def way(self) -> tuple[Any, ...]:
        """What traces that ask the same questions have in common."""
        return self.values, self.draws.of_torch, self.compiling


@dataclass(frozen=True)
class Capture:
    """A captured program, and the structures of its inputs and of its result.

    left: places besides the result where forward leaves tensors, with the structure of the value
        there. These tensors are outputs of the program, behind those of the result.
    guards: the Python state that it was captured with.
    assigned: plain values that forward puts in attributes and variables; each call repeats it.
    questions: those about values that it answers for the calls it serves, in the order asked.
    draws: the numbers that each call draws on the host, as inputs behind its tensors.
    guesses: the questions that it guessed; its forward checks them, and runs again with another
        program where one is wrong.
    met: how its trace met values.
    uncounted: those of what forward assigns that its calls leave alone, with a warning.
    """

    program: Program
    inputs: Structure
    result: Structure
    left: tuple[tuple[LeftAt, Structure], ...] = ()
    guards: Guards = _NO_GUARDS
    assigned: tuple[Assignment, ...] = ()
    questions: tuple[Question, ...] = ()
    draws: tuple[Draw, ...] = ()
    guesses: tuple[Question, ...] = ()
    met: Met | None = None
    uncounted: tuple[Assignment, ...] = ()

    def again(self, wrong: int | None, before: Met | None) -> Met:
        """How to meet values where the guess `wrong` is wrong, and right are those before.

        wrong: None if all are right.
        before: the same for what ran before this capture in the same call, if anything did.

        Raises:
            CaptureError: what was right is wrong now.
        """
        assert self.met is not None
        answers = tuple(guess.answer for guess in self.guesses)
        if wrong is not None:
            is_known = before is not None and before.way == self.met.way
            if is_known and wrong < len(before.answers):  # type: ignore[union-attr]
                raise CaptureError(
                    "the model decides by a value that is not the same when the same forward runs "
                    f"again: {self.guesses[wrong].statement(answers[wrong])}. Let it compute both "
                    "ways, by torch.where"
                )
            answers = (*answers[:wrong], not answers[wrong])
        return replace(self.met, answers=answers)

    def answers_as(self, again: Met) -> bool:
        """Whether it guesses what is known."""
        assert self.met is not None
        is_short = len(self.guesses) < len(again.answers)
        return self.met.way == again.way and not is_short and not self.guessed_otherwise(again)

    def guessed_otherwise(self, again: Met) -> Question | None:
        """The first question that it guessed otherwise than is known."""
        pairs = zip(self.guesses, again.answers, strict=False)
        return next((guess for guess, answer in pairs if guess.answer != answer), None)

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

    def assign(self) -> bool:
        """Put what forward assigns there; returns whether that was another value."""
        changed = [each for each in self.assigned if differs(each.place.read(), each.value)]
        for each in changed:
            each.place.write(each.value)
        return bool(changed)

    def computes_as(self, other: Capture) -> bool:
        """Whether the two are one program for calls of their sizes and give the same structure."""
        mine, theirs = self.program, other.program
        return (
            str(mine.graph) == str(theirs.graph)
            and mine.notes == theirs.notes
            and self.returns_as(other)
            and all(
                a.value is b.value or _equal(a.value, b.value)
                for a, b in zip(mine.buffers, theirs.buffers, strict=True)
            )
        )

    def followed_by(self, after: Capture) -> Capture:
        """This capture, where `after` is that of the same call behind its assignments.

        If that is another program, calls of this one assign, and the next one finds that. If it is
        the same, it serves calls before and after; what then has a third value, as a counter has,
        is warned of instead of assigned, since each value would need another capture to be known
        as harmless.
        """
        if not self.computes_as(after):
            return self
        again = {each.place.identity for each in after.assigned}
        counters = [each for each in self.assigned if each.place.identity in again]
        kept = tuple(each for each in self.assigned if each not in counters)
        if counters:
            paths = [each.place.path for each in counters]
            self.program.notes += (warn_of_state(paths, counters[0].at),)
        guards = self.guards
        if self.program.sizes is None:
            guards = guards.and_of(after.guards).also_after(kept)
        return replace(self, assigned=kept, guards=guards, uncounted=tuple(counters))

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


def refuse_uncounted(captures: Iterable[Capture]) -> None:
    """Refuse what calls of one program leave alone if another program reads it.

    Raises:
        CaptureError: names it.
    """
    captures = list(captures)
    uncounted = {each.place.identity: each for captured in captures for each in captured.uncounted}
    for captured in captures if uncounted else ():
        own = {each.place.identity for each in captured.uncounted}
        for place in captured.guards.places:
            if place.identity in uncounted and place.identity not in own:
                each = uncounted[place.identity]
                raise CaptureError(
                    f"the forward assigns {each.place.path}{each.at}, with which some calls "
                    "compute and others do not, so those left it alone and its value is wrong "
                    "now; register it as a buffer"
                )


def refuse_more_programs(captures: Sequence[Capture], statement: str, state: str) -> None:
    """Refuse a call of which no more is new than in each of many calls before.

    statement: what the call's values say; "" if they answer as for the last capture.
    state: the path and values of Python state that is not as for the last capture; "" if it is.

    Raises:
        CaptureError: there are `MOST_ANSWERS` programs for other answers, or as many that assign
            what they read.
    """
    path = state.partition(":")[0]
    paths = [[each.place.path for each in captured.assigned] for captured in captures]
    assigning = sum(path in assigned for assigned in paths)
    if assigning >= MOST_ANSWERS:
        raise CaptureError(
            f"the model computes with Python state that its forward changes ({state}), and "
            f"{assigning} programs were captured for as many values, the most there may be; "
            "register it as a buffer, which calls read and write"
        )
    asking = sum(1 for captured in captures if captured.questions or captured.guesses)
    if asking >= MOST_ANSWERS and statement:
        raise CaptureError(
            f"the model decides by the values of tensors, and {asking} programs were captured for "
            f"as many answers, the most there may be. In this call {statement}. "
            "Compute what depends on it by tensor operators (a mask, torch.where), or make the "
            "number a Python argument of forward that takes few values"
        )
