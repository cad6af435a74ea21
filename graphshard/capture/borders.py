"""The nodes that stand for the borders of a block's call, and for a call that is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.capture.alike import FEWEST, Block, Form
from graphshard.capture.kv_cache import Filled
from graphshard.capture.places import Place, Version
from graphshard.capture.structure import Structure

ENTER, EXIT, EXIT_BACKWARD, ENTER_BACKWARD = range(4)
"""The borders of a call: forward goes in and out at the first two, backward at the last two."""


class RepetitionError(Exception):
    """A call that was taken for a repetition may be none; users never see this error.

    kind: that of the call; None: it may be any.
    """

    def __init__(self, reason: str, kind: Kind | None = None) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(eq=False)
class Kind:
    """Calls that are alike.

    key: the block and the arguments, in the form to compare.
    reads: the attributes that the first call read, each with the path of its module in the block,
        and the value there.
    by_all: whether all attributes have to be alike, since code that runs in backward may read any,
        or code that takes them by other means than their names.
    around: the state besides the block's own that the run had read by the end of that call.
    writes: how often the run had assigned attributes by then.
    filled: what the first call put into a cache of keys and values.
    result: the structure of what a call returns.
    sources: where each tensor of the result is from: (True, number of an input), or (False, number
        of an own result).
    forms: those of the own results.
    expected: how many calls there are, by the run before this one.
    ends: the numbers of the first and the last call, once they were traced between borders.
    given: the numbers of the own results whose gradients the last call's backward got.
    gradients: the forms of the gradients that it gave, by input; None where it gave none.
    """

    key: Hashable
    block: Block
    reads: list[tuple[str, str, Any]] = field(default_factory=list)
    by_all: bool = False
    around: list[tuple[Place | Version, Any]] = field(default_factory=list)
    writes: int = 0
    filled: Filled | None = None
    result: Structure | None = None
    sources: tuple[tuple[bool, int], ...] = ()
    forms: tuple[Form, ...] = ()
    expected: int = 0
    met: int = 0
    ends: list[int] = field(default_factory=list)
    given: tuple[int, ...] = ()
    gradients: tuple[Form | None, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether calls of this kind are left out of the graph."""
        return self.expected >= FEWEST

    def note_given(self, call: int, places: tuple[int, ...]) -> None:
        """Note which own results of a call have gradients."""
        if call == self.ends[-1]:
            self.given = places
        self.require_given(places)

    def require_given(self, places: tuple[int, ...]) -> None:
        """Raise if other own results have gradients than in the last call."""
        if places != self.given:
            raise RepetitionError("backward meets a call otherwise than the last one", self)

    def note_gradients(self, call: int, forms: tuple[Form | None, ...]) -> None:
        """Note the gradients that a call gives."""
        if call == self.ends[-1]:
            self.gradients = forms
        if forms != self.gradients:
            raise RepetitionError("the first call gives other gradients than the last one", self)


_active: list[list[Kind]] = []
"""The kinds of the trace that is under way, by whose numbers nodes name them."""


@contextlib.contextmanager
def naming(kinds: list[Kind]) -> Iterator[None]:
    """A trace whose nodes name `kinds`, also those that are added meanwhile."""
    _active.append(kinds)
    try:
        yield
    finally:
        _active.pop()


_library = torch.library.Library("graphshard", "FRAGMENT")

_library.define("border(Tensor[] x, int call, int side) -> Tensor[]")
_library.define("left_out(Tensor[] x, int call, int kind, bool backward) -> Tensor[]")

BORDER = torch.ops.graphshard.border.default
LEFT_OUT = torch.ops.graphshard.left_out.default


@torch.library.impl(_library, "border", "CompositeExplicitAutograd")
def _border(x: list[Tensor], call: int, side: int) -> list[Tensor]:
    return [each.clone() for each in x]


@torch.library.register_fake("graphshard::border", lib=_library)
def _border_fake(x: list[Tensor], call: int, side: int) -> list[Tensor]:
    return [each.new_empty_strided(each.shape, each.stride()) for each in x]


@torch.library.register_fake("graphshard::left_out", lib=_library)
def _left_out_fake(x: list[Tensor], call: int, kind: int, backward: bool) -> list[Tensor]:
    repeated = _active[-1][kind]
    forms = repeated.gradients if backward else repeated.forms
    return [form.empty() for form in forms if form is not None]


class Border(torch.autograd.Function):
    """A border of a call, as an identity with a node in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, call: int, side: int, *x: Tensor) -> Any:
        """Copies of `x` in the graph."""
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.call, ctx.side = kind, call, side
        out = torch.ops.graphshard.border([*x], call, side)
        ctx.mark_non_differentiable(
            *(
                each
                for each, needed in zip(out, ctx.needs_input_grad[3:], strict=True)
                if not needed
            )
        )
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Copies of the gradients, of which the kind takes note."""
        kind = ctx.kind
        places = tuple(place for place, grad in enumerate(grads) if grad is not None)
        side = EXIT_BACKWARD if ctx.side == EXIT else ENTER_BACKWARD
        given = torch.ops.graphshard.border([grads[p] for p in places], ctx.call, side)
        back: list[Tensor | None] = [None] * len(grads)
        for place, grad in zip(places, given, strict=True):
            back[place] = grad
        if ctx.side == EXIT:
            kind.note_given(ctx.call, places)
        else:
            kind.note_gradients(ctx.call, tuple(g if g is None else Form.of(g) for g in back))
        return None, None, None, *back


class LeftOut(torch.autograd.Function):
    """A call that is left out: a node in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, call: int, arguments: int, *x: Tensor) -> Any:
        """The own results of the call with inputs `x`, the first of which are its arguments."""
        ctx.set_materialize_grads(False)
        ctx.arguments = arguments
        ctx.kind, ctx.call, ctx.number = kind, call, _active[-1].index(kind)
        out = torch.ops.graphshard.left_out([*x], call, ctx.number, False)
        ctx.mark_non_differentiable(
            *(each for each, form in zip(out, kind.forms, strict=True) if not form.requires_grad)
        )
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """The gradients of the inputs."""
        kind = ctx.kind
        places = tuple(place for place, grad in enumerate(grads) if grad is not None)
        kind.require_given(places)
        given = [grads[place] for place in places]
        back = iter(torch.ops.graphshard.left_out(given, ctx.call, ctx.number, True))
        return None, None, None, *(f and next(back) for f in kind.gradients)


def edges_of(node: Any, output: int) -> Any:
    """Where autograd goes on from an output of `node`: the edges that are sure to get a gradient.

    A user's Function may give none on purpose. A call that was left out gives one to its arguments;
    the weights of the block are those of its kind.
    """
    function = getattr(node, "_forward_cls", None)
    if function is Border:
        return node.next_functions[output : output + 1]
    if function is LeftOut:
        return node.next_functions[: node.arguments]
    return node.next_functions if function is None else ()
