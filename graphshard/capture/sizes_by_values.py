"""Code that asks for sizes which depend on values.

`if rows.numel() == 0: continue` skips what is empty. A graph holds one way, and the way for "not
empty" can also run on what is empty. That gives the same as to skip it where an empty tensor only
ever adds nothing. To know that, the model is traced twice, for sizes that are not 0 and for sizes
that are. In the first graph the sizes are then replaced by 0, and what empty tensors add is left
out; the rest must be the second graph.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphshard.capture.captured import Capture
from graphshard.capture.recipes import Recipes
from graphshard.errors import CaptureError, warn_user
from graphshard.program import ops
from graphshard.program.aliases import is_view_op
from graphshard.program.program import BACKWARD, Program, argument_key
from graphshard.program.sizes import check_sizes
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import unbacked
from graphshard.torch_private.compat import SYMBOLIC, size_expression
from graphshard.torch_private.patches import patched
from graphshard.torch_private.trace import without_functional
from graphshard.torch_private.unbacked import depends_on_values

_aten = torch.ops.aten

_EMPTY = "empty"
_ZEROS = "zeros"
_LACKING = (type(None), None)
"""Keys of values: no items; each item is 0; there is no value."""

_WRITTEN: Mapping[Any, int] = {
    _aten.index_add.default: 3,
    _aten.index_copy.default: 3,
    _aten.index_put.default: 2,
    _aten._unsafe_index_put.default: 2,
    _aten.masked_scatter.default: 2,
    _aten.scatter.src: 3,
    _aten.scatter_add.default: 3,
    _aten.slice_scatter.default: 1,
}
"""Operators that write values into a copy of the first operand, and the place of the values."""

_SUMS = frozenset({
    _aten.mm.default, _aten.bmm.default, _aten.sum.default, _aten.sum.dim_IntList,
    _aten.embedding_dense_backward.default, _aten.native_layer_norm_backward.default,
    _aten._fused_rms_norm_backward.default,
})  # fmt: skip
"""Operators whose every result is a sum over the items of the first operand."""

_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.mul.Tensor})

_LINEAR = frozenset({
    _aten.clone.default, _aten._to_copy.default, _aten.slice_backward.default,
    _aten.select_backward.default, _aten.neg.default, _aten.sum.default, _aten.sum.dim_IntList,
    torch.ops.prims.convert_element_type.default,
})  # fmt: skip
"""Operators, besides views, that give zeros for zeros."""


def admit_empty(captured: Capture, capture_where_empty: Callable[[], Capture]) -> Capture:
    """Drop the checks that sizes are not 0 from a program which is right if they are.

    `captured` is for none of the sizes that the model asks about being 0, and what
    `capture_where_empty` gives for all of them; its guards are added. A warning says what differs.
    """
    program = captured.program
    assert program.sizes is not None
    asked = program.sizes.not_empty
    at = "; ".join(f"{condition} ({line})" for condition, line in asked.items())
    other = None
    with contextlib.suppress(CaptureError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first trace said it
        other = capture_where_empty()
    if other is None or not _is_same_if_empty(captured, other):
        warn_user(
            "the forward asks whether a size that depends on values is 0. The program is right "
            f"only where {at}; a call for which that is not so raises SizeCheckError",
        )
        program.notes += (f"captured for the case that {at}; each call checks it",)
        return captured
    for node in [*program.nodes()]:
        if node.target is check_sizes and node.args[0] in asked:
            program.graph.erase_node(node)
    lines = "; ".join(dict.fromkeys(asked.values()))
    warn_user(
        f"the forward skips what is empty ({lines}). The program "
        "computes on it and gives the same, but gradients of what is skipped on all ranks are "
        "zeros, where eager may leave None: an optimizer with momentum or weight decay tells them "
        "apart",
    )
    program.notes += (f"captured for the case that {at}; the same program skips what is empty",)
    guards = captured.guards.and_of(other.guards)
    return replace(captured, guards=guards)


def _is_same_if_empty(captured: Capture, other: Capture) -> bool:
    """Whether `captured` computes for empty tensors what `other` does, which skips them."""
    sizes = captured.program.sizes
    assert sizes is not None
    if not captured.returns_as(other) or set(other.program.notes) - set(captured.program.notes):
        return False
    symbols = {s for condition in sizes.answers_if_empty for s in condition.free_symbols}
    keys: dict[Hashable, int] = {}
    with_zeros = _Keys(captured.program, keys, dict.fromkeys(symbols, sympy.Integer(0)))
    others = _Keys(other.program, keys, {})
    mine, theirs = with_zeros.ends(), others.ends()
    return (
        with_zeros.random == others.random
        and len(mine) == len(theirs)
        and all(
            one == other or (may_lack and other == _LACKING and with_zeros.is_zeros(one))
            for (one, may_lack), (other, _) in zip(mine, theirs, strict=True)
        )
    )


class _Keys:
    """What each node of a program computes, as numbers that equal nodes share.

    Two programs are compared by numbers in the same `keys`, which has them by what they stand for.
    `values` are those of symbols. `random` counts the nodes that draw random numbers.
    """

    def __init__(
        self, program: Program, keys: dict[Hashable, int], values: Mapping[Any, Any]
    ) -> None:
        self.program = program
        self.random = 0
        self._keys = keys
        self._values = values
        self._of: dict[fx.Node, Hashable] = {}
        self._of_constants = {
            entry.node: _constant_key(entry.value) for entry in program.buffers if entry.constant
        }
        for node in program.graph.nodes:
            if node.op != "output":
                self._of[node] = self._key(node)

    def ends(self) -> list[tuple[Hashable, bool]]:
        """The keys of all results, and whether each may be lacking instead of zeros."""
        results = self.program.results()
        ends = [(self._argument(value), False) for value in results.outputs]
        ends += [(self._argument(value), False) for value in results.mutations]
        ends.append((tuple((e.kind, e.name) for e in self.program.mutations), False))
        for value in (*results.grads, *results.input_grads):
            ends.append((self._argument(value), True))
        return ends

    def is_zeros(self, key: Hashable) -> bool:
        """Whether a key is that of zeros of some shape."""
        return isinstance(key, tuple) and key[:1] == (_ZEROS,)

    def _number(self, *content: Hashable) -> Hashable:
        return self._keys.setdefault(content, len(self._keys))

    def _argument(self, value: Any) -> Hashable:
        return argument_key(value, lambda leaf: self._of.get(leaf, str(leaf)))

    def _shape(self, node: fx.Node) -> tuple[Any, ...]:
        return tuple(self._size(size) for size in node.meta["val"].shape)

    def _size(self, size: Any) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        value = size_expression(size).xreplace(self._values)
        return int(value) if value.is_Integer else value

    def _zeros(self, node: fx.Node) -> Hashable:
        return _ZEROS, str(node.meta["val"].dtype), str(self._shape(node))

    def _key(self, node: fx.Node) -> Hashable:
        val = node.meta.get("val")
        if node.op == "placeholder":
            constant = self._of_constants.get(node)
            return self._number("input", node.name) if constant is None else constant
        if isinstance(val, SYMBOLIC) and isinstance(number := self._size(val), int):
            return argument_key(number, str)
        if isinstance(val, Tensor):
            if 0 in self._shape(node):
                return (_EMPTY,)
            if (simpler := self._simplified(node)) is not None:
                return simpler
        if node.target is operator.getitem and self._argument(node.args[0]) == (_ZEROS,):
            return self._zeros(node)
        if not isinstance(val, Tensor) and node.args and self._gives_zeros(node):
            return (_ZEROS,)  # a tuple of them
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        if node.target is _aten.add.Tensor and not node.kwargs and isinstance(args, tuple):
            args = tuple(sorted(args, key=str))
        drawn = 0
        if ops.is_random(node):
            drawn = self.random = self.random + 1
        return self._number(node.target, args, kwargs, drawn)

    def _simplified(self, node: fx.Node) -> Hashable | None:
        """The key of a tensor that has items, where empty operands or zeros say what it is."""
        target, args = node.target, node.args
        if target in _WRITTEN:
            written = args[_WRITTEN[target]]
            into_zeros = self._is_zero_node(args[0]) and self._is_zero_node(written)
            return self._argument(args[0]) if into_zeros or self._is_empty(written) else None
        if self._gives_zeros(node):
            return self._zeros(node)
        if target is _aten.cat.default:
            rest = [part for part in args[0] if not self._is_empty(part)]  # type: ignore[union-attr]
            return self._argument(rest[0]) if len(rest) == 1 else None
        if target is _aten.add.Tensor and not node.kwargs:
            for zeros, other in (args, args[::-1]):
                same = isinstance(other, fx.Node) and self._shape(other) == self._shape(node)
                if same and self._is_zero_node(zeros):
                    return self._argument(other)
        return None

    def _gives_zeros(self, node: fx.Node) -> bool:
        """Whether all results are zeros; in backward, if what is multiplied by zeros is finite."""
        if not node.args:
            return False
        if _makes_zeros(node):
            return True
        zeros = self._is_zero_node(node.args[0])
        if zeros and (is_view_op(node.target) or node.target in _LINEAR):
            return True
        if node.meta["phase"] == BACKWARD:
            if zeros and "backward" in str(node.target):  # linear in the gradient
                return True
            if node.target in _PRODUCTS and any(map(self._is_zero_node, node.args)):
                return True
        return node.target in _SUMS and self._is_empty(node.args[0])

    def _is_empty(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and self._of[value] == (_EMPTY,)

    def _is_zero_node(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and self.is_zeros(self._of[value])


def _makes_zeros(node: fx.Node) -> bool:
    if node.target in (_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default):
        return True
    fill = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2}
    value = node.args[fill[node.target]] if node.target in fill else None
    return isinstance(value, (int, float)) and value == 0 and math.copysign(1, value) > 0


def _constant_key(value: Any) -> Hashable:
    if value is None:
        return None
    value = value.detach().cpu().contiguous()
    content = value.view(-1).view(torch.uint8).numpy().tobytes()
    return "constant", str(value.dtype), tuple(value.shape), content


# -- sizes where Python or transformers ask for numbers ------------------------------------------


@contextlib.contextmanager
def max_and_min_of_sizes() -> Iterator[None]:
    """Let `max` and `min` of such sizes be sizes, as in `total / max(count, 1)`.

    Python decides by a comparison, which a trace cannot; torch has functions that give a size.
    """
    with (
        patched(builtins, "max", _of_sizes(builtins.max, torch.sym_max)),
        patched(builtins, "min", _of_sizes(builtins.min, torch.sym_min)),
        patched(torch.SymInt, "__bool__", _is_not_zero(torch.SymInt.__bool__)),
        patched(torch.SymFloat, "__bool__", _is_not_zero(torch.SymFloat.__bool__)),
    ):
        yield


def _is_not_zero(plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The truth value of a number: a condition, where torch would ask for the number."""

    def truth(number: Any) -> bool:
        return bool(number != 0) if depends_on_values(number) else plain(number)

    return truth


def _of_sizes(plain: Callable[..., Any], of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        if not kwargs and len(values) > 1 and any(map(depends_on_values, values)):
            return reduce(of_two, values)
        return plain(*args, **kwargs)

    return function


@contextlib.contextmanager
def dimensions_as_in_eager(is_one: Callable[[Any], bool]) -> Iterator[None]:
    """Let `squeeze` and `unbind` drop the dimensions that they drop in eager.

    Torch's rules for a size that depends on values take it for another than 1, without a word:
    `nonzero().squeeze()` would keep a dimension where a single element is found. `is_one` tells
    whether such a size is 1 in the calls that the program serves.
    """
    squeeze, squeeze_, unbind = Tensor.squeeze, Tensor.squeeze_, Tensor.unbind

    def squeezed(input: Tensor, dim: Any = None) -> Tensor:  # noqa: A002
        dims = range(input.dim()) if dim is None else dim if isinstance(dim, Sequence) else (dim,)
        if not any(isinstance(each, int) and depends_on_values(input.shape[each]) for each in dims):
            return squeeze(input) if dim is None else squeeze(input, dim)
        result = input
        for place in sorted({each % input.dim() for each in dims}, reverse=True):
            if is_one(input.shape[place]):
                result = result.select(place, 0)
        return result

    def unbound(input: Tensor, dim: Any = 0) -> Any:  # noqa: A002
        if not (input.dim() and isinstance(dim, int) and depends_on_values(input.shape[dim])):
            return unbind(input, dim)
        return tuple(input.select(dim, number) for number in range(int(input.shape[dim])))

    def refused(x: Tensor, *dim: Any) -> Tensor:
        if any(map(depends_on_values, x.shape)):
            raise CaptureError("squeeze_ is given a size that depends on values; use squeeze")
        return squeeze_(x, *dim)

    with (
        patched(Tensor, "squeeze_", refused),
        patched(Tensor, "squeeze", squeezed),
        patched(Tensor, "unbind", unbound),
        patched(torch, "squeeze", squeezed),
        patched(torch, "unbind", unbound),
    ):
        yield


_CHOSEN = "expert_hit"
"""The name that transformers gives the numbers of the chosen experts, of shape (chosen, 1)."""


@contextlib.contextmanager
def all_experts(recipes: Recipes) -> Iterator[None]:
    """Let a loop of transformers over the chosen experts run over all.

    Which experts a batch chooses depends on values, and a graph cannot loop over them. The code for
    an expert that no token chose computes on no rows and adds nothing, so the numbers are the same.
    An expert may be looked up by the text of its number, which the `recipes` of a trace give.
    """
    iterate: Callable[[Tensor], Iterator[Tensor]] = Tensor.__iter__

    def over_all(self: Tensor) -> Iterator[Tensor]:
        frame = sys._getframe(1)
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("transformers.") or frame.f_locals.get(_CHOSEN) is not self:
            return iterate(self)
        count = self.shape[0]
        if not unbacked.depends_on_values(count):
            return iterate(self)
        most = torch_compat.size_hint(count)
        return (torch.full((1,), number, device=self.device) for number in range(most))

    plain: Callable[[Tensor, str], str] = Tensor.__format__

    def text(self: Tensor, form: str) -> str:
        recipe = recipes.of(without_functional(self)) if self.dim() == 0 else None
        number = None if recipe is None or recipe.is_symbolic() else recipe.constant_item()
        return plain(self, form) if number is None else format(number, form)

    with patched(Tensor, "__iter__", over_all), patched(Tensor, "__format__", text):
        yield
