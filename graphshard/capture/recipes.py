"""How a trace's fake tensors were made, so that the value of one can be computed when asked for.

Model code asks questions such as `(position_ids[:, 0] == 0).all()`. Fake tensors have no values,
but one made by operators of constants can be made for real. So can one made of a call's inputs and
buffers, once these are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard.program.sizes import hint
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.unbacked import ITEM, depends_on_values, raw_expression, raw_symbols

# Larger tensors are not computed for an answer: such code depends on real data.
_MAX_NUMEL = 1 << 24


_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


def _is_literal(func: Any, args: Sequence[Any]) -> bool:
    """Whether the code states the result, as 0 in `x[mask] = 0`; an array's memory is not its own.

    Other real tensors may hold something else in the next call.
    """
    return func in _LIFTS and torch_trace.is_real(args[0]) and args[0].untyped_storage().resizable()


class _UnknownValueError(Exception):
    """The value of a tensor depends on what no recipe knows, or is too large to be computed."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that a recipe starts from.

    key: the number of an input, or the FQN of a buffer; None for numbers that the model computes.
    shape: may be symbolic.
    """

    key: Any
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor, key: Any) -> Leaf:
        """The leaf for `tensor`."""
        return Leaf(key, tuple(tensor.shape), tensor.dtype, tensor.device)


Numbers = Callable[[Any], Any]
"""Gives the value of a symbolic size."""

Values = Callable[[Leaf], Tensor]
"""Gives the value of a leaf."""


def _size(tensor: Tensor, dim: int) -> Tensor:
    return torch.tensor(tensor.shape[dim], device="cpu")


@dataclass(frozen=True, eq=False)
class Recipe:
    """An operator and its arguments, recipes among them; it outlives the fake tensors.

    index: of the result, if the operator gives several.
    gives_number: whether what takes the result takes it as a Python number.
    """

    func: Any
    args: Any
    kwargs: Any
    index: int | None = None
    gives_number: bool = False

    def item(self, number: Numbers, value_of: Values | None = None) -> Any:
        """The value of a single element, as a Python number."""
        with torch.no_grad(), torch_trace.without_modes():
            return self._evaluate(number, value_of, {}).item()

    def _evaluate(
        self, number: Numbers, value_of: Values | None, done: dict[Any, Tensor]
    ) -> Tensor:
        def real(value: Any) -> Any:
            if isinstance(value, SYMBOLIC):
                return number(value)
            if isinstance(value, Leaf) and value not in done:
                assert value_of is not None
                done[value] = value_of(value)
            if isinstance(value, Recipe) and value not in done:
                done[value] = value._evaluate(number, value_of, done)
            if not isinstance(value, (Leaf, Recipe)):
                return value
            gives_number = isinstance(value, Recipe) and value.gives_number
            return done[value].item() if gives_number else done[value]

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        results = self.func(*args, **kwargs)
        result: Tensor = results if self.index is None else results[self.index]
        if result.numel() > _MAX_NUMEL:
            raise _UnknownValueError
        return result

    def size(self, dim: int) -> Recipe:
        """How the size of a dimension of its result is made, as a tensor of one element."""
        return Recipe(_size, (self, dim), {}, gives_number=True)

    def constant_item(self) -> Any:
        """As `item`, if constants alone make it; None otherwise, or if it is too large."""
        try:
            return None if self.leaves() else self.item(hint)
        except _UnknownValueError:
            return None

    def leaves(self) -> set[Leaf]:
        """The tensors that it starts from."""
        return {each for each in self._within() if isinstance(each, Leaf)}

    def is_of_call(self) -> bool:
        """Whether inputs and buffers of a call are all that it starts from."""
        return all(leaf.key is not None for leaf in self.leaves())

    def is_symbolic(self) -> bool:
        """Whether the value depends on a symbolic size."""
        return any(isinstance(each, SYMBOLIC) for each in self._within())

    def _within(self) -> Iterable[Any]:
        seen, reached = {self}, [self]
        for recipe in reached:
            for each in tree_leaves((recipe.args, recipe.kwargs)):
                if isinstance(each, Recipe) and each not in seen:
                    seen.add(each)
                    reached.append(each)
                yield each


class Recipes:
    """The operator and arguments that made each fake tensor that constants alone make.

    Once `start_from` was called, those that given leaves make, and truth values about numbers that
    the model computes; not places among them, such as those of `argmax`.

    numbers: how the numbers were made that are read off such tensors, by symbol.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, Recipe] = {}
        self._made_by = WeakTensorKeyDictionary()
        self._leaves: Any = None

    def start_from(self, leaves: Iterable[tuple[Tensor, Leaf]]) -> None:
        """Begin a run of the model, in which `leaves` have values."""
        self._leaves = WeakTensorKeyDictionary()
        for tensor, leaf in leaves:
            self._leaves[tensor] = leaf

    def remember(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Note that `func` of these arguments made `result`."""
        if func._schema.is_mutable:
            self._forget_written(func, args)
            return
        # An empty tensor has no values yet; every fake weight and input starts as one.
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return
        several = isinstance(result, (tuple, list))
        for index, one in enumerate(result if several else (result,)):
            if not isinstance(one, Tensor) or hint(one.numel()) > _MAX_NUMEL:
                continue
            compares = self._leaves is not None and one.dtype == torch.bool
            operands = (*args, *kwargs.values())
            if not (compares or _is_literal(func, args) or self._are_known(operands)):
                continue
            if all(one is not each for each in tree_leaves(operands)):  # `aten.to` may give it back
                self._made_by[one] = func, args, dict(kwargs), index if several else None

    def _are_known(self, values: Iterable[Any]) -> bool:
        """Whether every tensor and number among `values`, and in lists among them, is known."""
        for value in values:
            if isinstance(value, Tensor):
                if value not in self._made_by and value not in (self._leaves or ()):
                    return False
            elif isinstance(value, (list, tuple)):
                if not self._are_known(value):
                    return False
            elif depends_on_values(value) and raw_expression(value) not in self.numbers:
                return False
        return True

    def note_numbers(self, func: Any, args: Any, result: Any) -> None:
        """Note how the numbers are made that `func`, of these arguments, reads off values."""
        symbols = [] if self._leaves is None else raw_symbols(result)
        if self.numbers.keys() >= set(symbols):
            return
        for tensor in tree_leaves(args[0] if func is ITEM else result):
            recipe = self.of(tensor) if isinstance(tensor, Tensor) else None
            if recipe is None:
                continue
            if func is ITEM:
                number = replace(recipe, gives_number=True)
                self.numbers.update(dict.fromkeys(symbols, number))
                continue
            for dim, size in enumerate(tensor.shape):
                if isinstance(size, SYMBOLIC) and raw_expression(size) in symbols:
                    self.numbers[raw_expression(size)] = recipe.size(dim)

    def _forget_written(self, func: Any, args: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for known in (self._made_by, self._leaves or {}):
                    if isinstance(value, Tensor) and value in known:
                        del known[value]

    def of(self, tensor: Tensor) -> Recipe | None:
        """The operators that make `tensor` of constants and leaves, if they are known."""
        try:
            made = self._of(tensor, {})
        except _UnknownValueError:
            return None
        if isinstance(made, Leaf):
            made = Recipe(torch.ops.aten.alias.default, (made,), {})
        return made

    def _number(self, size: Any) -> Recipe:
        number = self.numbers.get(raw_expression(size))
        if number is None:
            raise _UnknownValueError
        return number

    def _of(self, tensor: Tensor, done: dict[int, Recipe | Leaf]) -> Recipe | Leaf:
        if id(tensor) in done:
            return done[id(tensor)]
        if tensor in self._made_by:
            func, args, kwargs, index = self._made_by[tensor]

            def inner(value: Any) -> Any:
                if depends_on_values(value):
                    return self._number(value)
                is_made = isinstance(value, Tensor) and not _is_literal(func, args)
                return self._of(value, done) if is_made else value

            args, kwargs = tree_map(inner, (args, kwargs))
            made: Recipe | Leaf = Recipe(func, args, kwargs, index)
        elif tensor in (self._leaves or ()):
            made = self._leaves[tensor]
        elif (
            self._leaves is not None
            and tensor.is_floating_point()
            and not torch_trace.is_real(tensor)
        ):
            made = Leaf.of(tensor, None)
        else:
            raise _UnknownValueError
        done[id(tensor)] = made
        return made
