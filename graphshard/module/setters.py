"""Running a method of the model that only sets Python state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphshard.capture.side_effects import NO_COMPUTE, PLANNED, ModuleTables
from graphshard.errors import ModelChangeError, RuntimeStateError
from graphshard.format import some_of


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
    sharded: nn.Module,
    model: nn.Module,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[bool, Any]:
    """Call `method`; (True, its result), or (False, why) if it has to be captured.

    It has to be if it computes with tensors, gives one, or is given one and sets an attribute. What
    it had set until then of the attributes of `model` and the modules below is taken back. It also
    has to be, to see what it leaves, if it changes parameters or modules of `sharded` on its way;
    `why` then says so, and is "" otherwise.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    tables = ModuleTables(sharded, PLANNED, PLANNED)
    why = ""
    # A part refuses to be called: so does a method that computes by parts alone.
    try:
        with _RefuseComputing():
            result = method(*args, **kwargs)
        keeps = _has_tensors((args, kwargs)) and any(
            attributes.keys() != content.keys()
            or any(attributes[name] is not content[name] for name in content)
            for attributes, content in before
        )
        if changed := tables.changed():
            what = f"it adds, removes or replaces {some_of(changed)}"
            why = str(ModelChangeError.by(method.__name__, what))
        if not why and not keeps and not _has_tensors(result):
            return True, result
    except (_ComputesError, RuntimeStateError) as error:
        why = str(error) if isinstance(error, ModelChangeError) else ""
    tables.restore()
    for attributes, content in before:
        attributes.clear()
        attributes.update(content)
    return False, why


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
