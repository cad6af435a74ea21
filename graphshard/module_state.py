"""What a forward does to Python state while it is traced: noticed, and undone.

A captured program keeps the values it saw and repeats no assignment, so such code must be said.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
# nn.LSTM and its kind list their own weights anew in every forward.
_NO_STATE = frozenset({*_TABLES, "_flat_weights", "_flat_weight_refs"})
_CONTAINERS = (dict, list, set, OrderedDict)  # the last holds hooks
_PLAIN = (int, float, str, bool, bytes, complex)
_MISSING = object()


class _Before:
    """A module's attributes as they were, with the contents of plain containers among them."""

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
def own_state(model: nn.Module) -> Iterator[list[str]]:
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
def own_randomness() -> Iterator[list[str]]:
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
    return [part for item in items.items() for part in item]
