"""Running a method of the model that only sets Python state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphshard.capture.side_effects import NO_COMPUTE
from graphshard.errors import RuntimeStateError


class _ComputesError(Exception):
    """A method called a function of torch."""


class _RefuseComputing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in NO_COMPUTE:
            raise _ComputesError
        return func(*args, **(kwargs or {}))


def run_setter(
    model: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """Call `method`; (True, its result), or (False, None) if it has to be captured.

    It has to be if it computes with tensors, gives one, or is given one and sets an attribute. What
    it had set until then of the attributes of `model` and the modules below is taken back.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    # A part refuses to be called: so does a method that computes by parts alone.
    with contextlib.suppress(_ComputesError, RuntimeStateError), _RefuseComputing():
        result = method(*args, **kwargs)
        keeps = _has_tensors((args, kwargs)) and any(
            attributes.keys() != content.keys()
            or any(attributes[name] is not content[name] for name in content)
            for attributes, content in before
        )
        if not keeps and not _has_tensors(result):
            return True, result
    for attributes, content in before:
        attributes.clear()
        attributes.update(content)
    return False, None


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
