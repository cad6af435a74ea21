"""Side effects of a forward on Python state during a trace: they are reported and undone.

A captured program keeps the values it saw and repeats no assignment, so the user must be told.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from graphshard.errors import CaptureError

_TABLES = ("_parameters", "_buffers", "_modules")


# nn.LSTM and its kind list their own weights anew in every forward.
_NO_STATE = frozenset({*_TABLES, "_flat_weights", "_flat_weight_refs"})


_CONTAINERS = (dict, list, set, OrderedDict)  # the last holds hooks


_PLAIN = (int, float, str, bool, bytes, complex)


_MISSING = object()


class _Before:
    """A copy of a module's attributes, and of the contents of plain containers among them."""

    def __init__(self, fqn: str, module: nn.Module) -> None:
        self.prefix = f"{fqn}." if fqn else ""
        self.module = module
        self.attributes = dict(vars(module))
        self.contents = {
            name: copy.copy(value)
            for name, value in self.attributes.items()
            if name in _TABLES or type(value) in _CONTAINERS
        }

    def changed(self) -> list[str]:
        """Names of the attributes that now differ."""
        return [
            self.prefix + name
            for name, value in vars(self.module).items()
            if name not in _NO_STATE
            and (
                _differs(self.attributes.get(name, _MISSING), value)
                or (name in self.contents and _content_differs(self.contents[name], value))
            )
        ]

    def restore(self) -> None:
        """Put attributes and contents back."""
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for name, content in self.contents.items():
            container = self.attributes[name]
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


@contextlib.contextmanager
def restore_module_state(model: nn.Module) -> Iterator[list[str]]:
    """Restore every module's attributes on leaving; the list then names those that were changed."""
    before = [_Before(fqn, module) for fqn, module in model.named_modules()]
    changes: list[str] = []
    try:
        yield changes
    finally:
        for each in before:
            changes += each.changed()
        for each in before:
            each.restore()


@contextlib.contextmanager
def restore_random_state() -> Iterator[list[str]]:
    """Restore the random states of Python and numpy; the list then names those that were used."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    used: list[str] = []
    try:
        yield used
    finally:
        if random.getstate() != python_state:
            used.append("random")
            random.setstate(python_state)
        if numpy and repr(numpy.random.get_state()) != repr(numpy_state):
            used.append("numpy.random")
            numpy.random.set_state(numpy_state)


def _differs(before: Any, after: Any) -> bool:
    if before is after:
        return False
    return not (isinstance(before, _PLAIN) and type(before) is type(after) and before == after)


def _content_differs(before: Any, after: Any) -> bool:
    if type(before) is not type(after) or len(before) != len(after):
        return True
    if isinstance(before, set):
        return bool(before != after)
    if isinstance(before, dict):
        before, after = _flat(before), _flat(after)
    return any(_differs(old, new) for old, new in zip(before, after, strict=True))


def _flat(items: dict[Any, Any]) -> list[Any]:
    return [key_or_value for item in items.items() for key_or_value in item]


_ASSIGN: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class NoDataAssignments(TorchFunctionMode):
    """Inside this mode an assignment to `.data` of a tensor is refused, since it would be lost.

    Args:
        names: of parameters and buffers, by identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._error: CaptureError | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it is the assignment."""
        if func == _ASSIGN:
            self._error = self._refusal(args[0])
            raise self._error
        return func(*args, **(kwargs or {}))

    def _refusal(self, tensor: Tensor) -> CaptureError:
        what = self._names.get(id(tensor), "a tensor")
        return CaptureError(
            f"the forward assigns .data of {what}, which goes past any trace, so a captured "
            "program would not do it; write into a buffer with copy_, or return the new value"
        )

    def require(self) -> None:
        """Raise the refusal again, if the model caught it.

        Raises:
            CaptureError: an assignment was refused.
        """
        if self._error is not None:
            raise self._error


_aten = torch.ops.aten


# BatchNorm's operators whose schemas do not say that they write running statistics.
_UNSAID = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten.cudnn_batch_norm.default,
        _aten.miopen_batch_norm.default,
    }
)


class WriteError(Exception):
    """An operator writes in place in a trace without functionalization, which is then repeated with
    it; users never see this error.
    """


class NoWrites:
    """Ends a trace, where it was `watching`, if an operator wrote in place."""

    def __init__(self) -> None:
        self._watches = False
        self._met = False

    @contextlib.contextmanager
    def watching(self, watches: bool = True) -> Iterator[None]:
        """Watch, or look away: the operators inside a fake kernel may write.

        A forward that writes is run to its end before it is refused, since it may have changed
        Python state which it will restore.

        Raises:
            WriteError: at the end, if an operator wrote.
        """
        before, self._watches = self._watches, watches
        try:
            yield
        finally:
            self._watches = before
        if watches and self._met:
            raise WriteError

    def meet(self, operator: Any) -> None:
        """Note an operator that is about to run."""
        if self._watches and _writes(operator):
            self._met = True

    def require(self, graph: fx.Graph) -> None:
        """Check a finished trace for writes: autograd's own operators run outside of `watching`.

        Raises:
            WriteError: an operator writes in place.
        """
        if self._met or any(_writes(node.target) for node in graph.nodes):
            raise WriteError


def _writes(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or operator in _UNSAID)
