"""The fake tensors of capture: no storage, but constants that can still be asked for their value."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard import torch_compat

# Constants larger than this are not evaluated during capture: such code depends on real data.
_MAX_CONSTANT_NUMEL = 1 << 24


def constant_folding_fake_mode() -> Any:
    """A FakeTensorMode that answers `.item()` on values computed from constants alone.

    Model code asks questions such as `(position_ids[:, 0] == 0).all()` whose operands are made by
    arange or ones: eager takes one branch, always the same. Fake tensors have no values, so the
    mode remembers how each such tensor was made and computes it for real when asked.
    """
    base = torch_compat.fake_tensor_mode()

    class ConstantFoldingFakeMode(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(allow_non_fake_inputs=True)
            self._recipes = WeakTensorKeyDictionary()

        def dispatch(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.ops.aten._local_scalar_dense.default and args[0] in self._recipes:
                with contextlib.suppress(KeyError), torch._C._DisableTorchDispatch():
                    return self._evaluate(args[0]).item()
            result = super().dispatch(func, types, args, kwargs)
            self._remember(func, args, kwargs, result)
            return result

        def _remember(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
                self._forget_mutated(func, args)
                return
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if any(t not in self._recipes for t in operands):
                return
            if not isinstance(result, Tensor) or "empty" in func._schema.name:
                return  # an empty tensor has no values yet; every weight and input starts as one
            if result.numel() <= _MAX_CONSTANT_NUMEL and result.device.type != "meta":
                self._recipes[result] = (func, args, dict(kwargs))

        def _forget_mutated(self, func: Any, args: Any) -> None:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._recipes.pop(value, None) if isinstance(value, Tensor) else None

        def _evaluate(self, tensor: Tensor) -> Tensor:
            func, args, kwargs = self._recipes[tensor]

            def real(value: Any) -> Any:
                return self._evaluate(value) if isinstance(value, Tensor) else value

            args, kwargs = torch.utils._pytree.tree_map(real, (args, kwargs))
            result: Tensor = func(*args, **kwargs)
            return result

    return ConstantFoldingFakeMode()
