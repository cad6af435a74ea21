"""The fake tensors of capture: without storage, but constants among them can be evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphshard.capture.as_eager import INTERPOLATION_BACKWARDS, interpolation_gradient
from graphshard.capture.errors import refuse_operator
from graphshard.capture.recipes import Recipes
from graphshard.capture.side_effects import NoWrites
from graphshard.program.sizes import Answer, Sizes
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.kernels import DEVICE, OTHERWISE, as_real

_SLICES = frozenset({torch.ops.aten.slice.Tensor, torch.ops.aten.select.int})


def constant_folding_fake_mode(
    sizes: Sizes | None = None, device: str = DEVICE, recipes: Recipes | None = None
) -> Any:
    """A FakeTensorMode that answers `.item()` on values computed from constants alone.

    Its results are those of the real kernels, where it is known that torch's fake ones differ.

    Model code asks questions such as `(position_ids[:, 0] == 0).all()` whose operands are made by
    arange or ones: eager takes one branch, always the same. Fake tensors have no values, so the
    mode remembers how each such tensor was made and computes it for real when asked. If symbolic
    sizes are among the constants, it answers for the example's and notes the question in `sizes`.
    `recipes` are told how tensors are made. `device` is the type of the one that the program will
    run on.
    """
    base = torch_compat.fake_tensor_mode()
    ask = torch.ops.aten._local_scalar_dense.default
    grouped = torch_compat.grouped_mm()
    by_value, _, _ = torch_trace.untraceable_errors()

    class ConstantFoldingFakeMode(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            environment = None if sizes is None else sizes.environment
            super().__init__(allow_non_fake_inputs=True, shape_env=environment)
            self.recipes = recipes or Recipes()
            self.no_writes = NoWrites()
            self.asked = 0  # how often for a value
            self.unanswered: Exception | None = None  # the first, which the model may catch

        def dispatch(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            refuse_operator(func, args, kwargs)
            self.no_writes.meet(func)
            self.asked += func is ask
            recipe = self.recipes.of(args[0]) if func is ask else None
            answer = None if recipe is None else recipe.constant_item()
            if recipe is not None and answer is not None:
                if sizes is not None and recipe.is_symbolic():
                    sizes.answers.append(Answer(recipe.item, answer))
                return answer
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
            if sizes is not None and func in _SLICES:
                sizes.note_slice(args, result)
            self.recipes.remember(func, args, kwargs, result)
            self.recipes.note_numbers(func, args, result)
            return result

    return ConstantFoldingFakeMode()
