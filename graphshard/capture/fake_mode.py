"""The fake tensors of capture: without storage, but constants among them can be evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard.capture.as_eager import INTERPOLATION_BACKWARDS, interpolation_gradient
from graphshard.capture.errors import refuse_operator
from graphshard.capture.side_effects import NoWrites
from graphshard.program.sizes import Answer, Sizes, hint
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.kernels import DEVICE, OTHERWISE, as_real
from graphshard.torch_private.unbacked import depends_on_values

# Constants larger than this are not evaluated during capture: such code depends on real data.
_MAX_CONSTANT_NUMEL = 1 << 24


class _UnknownValueError(Exception):
    """A fake tensor depends on more than constants, or is too large to be evaluated."""


class _Recipes:
    """The operator and arguments that made each fake tensor which depends on constants alone."""

    def __init__(self) -> None:
        self._made_by = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._made_by

    def remember(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if func._schema.is_mutable:
            self._forget_written(func, args)
            return
        if not isinstance(result, Tensor) or hint(result.numel()) > _MAX_CONSTANT_NUMEL:
            return
        # An empty tensor has no values yet; every fake weight and input starts as one.
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return
        if self._are_constants(args) and self._are_constants(kwargs.values()):
            self._made_by[result] = (func, args, dict(kwargs))

    def _are_constants(self, values: Iterable[Any]) -> bool:
        """Whether every tensor and number among `values`, and in lists among them, is known."""
        for value in values:
            if isinstance(value, Tensor):
                if value not in self._made_by:
                    return False
            elif isinstance(value, (list, tuple)):
                if not self._are_constants(value):
                    return False
            elif depends_on_values(value):
                return False
        return True

    def _forget_written(self, func: Any, args: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and value in self:
                del self._made_by[value]

    def recipe(self, tensor: Tensor) -> _Recipe:
        """The operators that make `tensor`."""
        if tensor not in self._made_by:
            raise _UnknownValueError
        func, args, kwargs = self._made_by[tensor]

        def inner(value: Any) -> Any:
            return self.recipe(value) if isinstance(value, Tensor) else value

        return _Recipe(func, *tree_map(inner, (args, kwargs)))


@dataclass(frozen=True)
class _Recipe:
    """An operator and its arguments, recipes among them; it outlives the fake tensors."""

    func: Any
    args: Any
    kwargs: Any

    def evaluate(self, number: Callable[[Any], Any]) -> Tensor:
        """The value; `number` gives the value of a symbolic size."""

        def real(value: Any) -> Any:
            if isinstance(value, _Recipe):
                return value.evaluate(number)
            return number(value) if isinstance(value, SYMBOLIC) else value

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        result: Tensor = self.func(*args, **kwargs)
        if result.numel() > _MAX_CONSTANT_NUMEL:
            raise _UnknownValueError
        return result

    def item(self, number: Callable[[Any], Any]) -> Any:
        """The value of a single element, as a Python number."""
        with torch.no_grad(), torch_trace.without_dispatch_modes():
            return self.evaluate(number).item()

    def is_symbolic(self) -> bool:
        """Whether the value depends on a symbolic size."""
        return any(
            leaf.is_symbolic() if isinstance(leaf, _Recipe) else isinstance(leaf, SYMBOLIC)
            for leaf in tree_leaves((self.args, self.kwargs))
        )


def constant_folding_fake_mode(sizes: Sizes | None = None, device: str = DEVICE) -> Any:
    """A FakeTensorMode that answers `.item()` on values computed from constants alone.

    Its results are those of the real kernels, where it is known that torch's fake ones differ.

    Model code asks questions such as `(position_ids[:, 0] == 0).all()` whose operands are made by
    arange or ones: eager takes one branch, always the same. Fake tensors have no values, so the
    mode remembers how each such tensor was made and computes it for real when asked. If symbolic
    sizes are among the constants, it answers for the example's and notes the question in `sizes`.
    `device` is the type of the one that the program will run on.
    """
    base = torch_compat.fake_tensor_mode()
    ask = torch.ops.aten._local_scalar_dense.default
    grouped = torch_compat.grouped_mm()
    by_value, _, _ = torch_trace.untraceable_errors()

    class ConstantFoldingFakeMode(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            environment = None if sizes is None else sizes.environment
            super().__init__(allow_non_fake_inputs=True, shape_env=environment)
            self._recipes = _Recipes()
            self.no_writes = NoWrites()
            self.unanswered: Exception | None = None  # the first, which the model may catch

        def dispatch(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            refuse_operator(func, args, kwargs)
            self.no_writes.meet(func)
            if func is ask and args[0] in self._recipes:
                with contextlib.suppress(_UnknownValueError):
                    return self._answer(self._recipes.recipe(args[0]))
            if func is grouped and args[0].dtype != torch.bfloat16:
                with self:
                    return torch_compat.grouped_mm_output(*args, **kwargs)
            if func in INTERPOLATION_BACKWARDS:
                with self:
                    return interpolation_gradient(*args, **kwargs)
            with self.no_writes.watching(False):
                try:
                    result = super().dispatch(func, types, args, kwargs)
                except by_value as error:
                    self.unanswered = self.unanswered or error
                    raise
            if func in OTHERWISE and device == DEVICE:
                with self:
                    result = as_real(func, args, kwargs, result)
            self._recipes.remember(func, args, kwargs, result)
            return result

        def _answer(self, recipe: _Recipe) -> Any:
            value = recipe.item(hint)
            if sizes is not None and recipe.is_symbolic():
                sizes.answers.append(Answer(recipe.item, value))
            return value

    return ConstantFoldingFakeMode()
