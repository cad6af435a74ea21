"""Places in Python state, which a forward reads and writes: attributes, items, globals, cells."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphshard.capture.structure import Same

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "not set"})()
"""The value of a place that holds none."""

_REFILLED = (OrderedDict, dict, list, set, deque)


@dataclass(frozen=True, eq=False)
class Place:
    """An entry of `owner`: a dict (attributes, globals), a class, an object with slots, or a cell.

    path: for people.
    of_module: it is an attribute of a module of the model, whose changes a sharded module counts.
    """

    path: str
    owner: Any
    key: Any = None
    of_module: bool = False

    def read(self) -> Any:
        """The value there, or `MISSING`."""
        entries = self.entries
        if entries is not None:
            return entries.get(self.key, MISSING)
        if isinstance(self.owner, types.CellType):
            try:
                return self.owner.cell_contents
            except ValueError:  # nothing is assigned to the name yet
                return MISSING
        try:
            return object.__getattribute__(self.owner, self.key)
        except AttributeError:
            return MISSING

    def write(self, value: Any) -> None:
        """Put `value` there; `MISSING`: nothing."""
        if value is MISSING:
            self._clear()
        elif isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)

    def _clear(self) -> None:
        if isinstance(self.owner, types.CellType):
            del self.owner.cell_contents
        elif isinstance(self.owner, dict):
            self.owner.pop(self.key, None)
        else:
            delattr(self.owner, self.key)

    @property
    def entries(self) -> Mapping[Any, Any] | None:
        """The mapping that it is an entry of, if it is one."""
        if isinstance(self.owner, type):
            return self.owner.__dict__
        return self.owner if isinstance(self.owner, dict) else None

    @property
    def identity(self) -> tuple[int, Any]:
        """The same for two places that are one."""
        return id(self.owner), self.key


class Assignment(NamedTuple):
    """A place, the value that is put there, and where in the source, as a remark."""

    place: Place
    value: Any
    at: str = ""


@dataclass(frozen=True, eq=False)
class Version:
    """The counter of writes into a tensor whose values were read as numbers."""

    path: str
    owner: torch.Tensor
    of_module = False
    entries = None
    key = None

    def read(self) -> Any:
        """The count."""
        return self.owner._version

    @property
    def identity(self) -> tuple[int, Any]:
        """The same for two of one tensor."""
        return id(self.owner), Version


@dataclass(frozen=True, eq=False)
class Contents:
    """All items of a list, deque, dict or set, as a place to write to."""

    path: str
    owner: Any

    def read(self) -> Any:
        """A plain copy of the container."""
        return contents(self.owner)

    def write(self, value: Any) -> None:
        """Give the container the items of `value`, a plain one.

        An item that is in a `Same` is taken out of it.
        """
        if isinstance(value, dict):
            refill(self.owner, {key: _own(item) for key, item in value.items()})
        else:
            refill(self.owner, map(_own, value))

    @property
    def identity(self) -> tuple[int, Any]:
        """The same for two places that are one."""
        return id(self.owner), Contents


@dataclass(frozen=True, eq=False)
class Buffer:
    """A buffer that a forward replaced by a tensor with a gradient; `path` is its name."""

    path: str


@dataclass(frozen=True, eq=False)
class Argument:
    """A list or dict among the arguments of a call, to which forward adds items.

    keys: what leads to it from `(args, kwargs)`.
    """

    path: str
    keys: tuple[Any, ...]

    def add(self, call: Any, value: Any) -> None:
        """Add the items of `value` to that container of `call`, its `(args, kwargs)`."""
        for key in self.keys:
            call = call[key]
        (call.update if isinstance(call, dict) else call.extend)(value)


LeftAt = Place | Contents | Buffer | Argument
"""Where a forward leaves tensors besides its result."""


def arguments_in(call: Any, keys: tuple[Any, ...] = (), path: str = "") -> Iterator[Any]:
    """Each list and dict in `call`, with its `Argument` and a copy of it."""
    if type(call) in (list, dict) and len(keys) > 1:
        yield call, Argument(path, keys), call.copy()
    if type(call) in (list, dict, tuple):
        for key, item in call.items() if isinstance(call, dict) else enumerate(call):
            inner = f"{path}[{key!r}]" if keys else ("args", "kwargs")[key]
            yield from arguments_in(item, (*keys, key), inner)


def added(container: Any, before: Any) -> Any:
    """What `container` has besides all of `before`, its copy; None if it lacks some of that."""
    if isinstance(before, dict):
        kept = all(container.get(key, MISSING) is value for key, value in before.items())
        return {k: v for k, v in container.items() if k not in before} if kept else None
    kept = list(map(id, container[: len(before)])) == list(map(id, before))
    return container[len(before) :] if kept else None


def _own(item: Any) -> Any:
    return item.value if isinstance(item, Same) else item


def contents(container: Any) -> Any:
    """A copy of a list, deque, dict or set as a plain one.

    A subclass's own methods, which may rename keys or load what is not there yet, are not called.
    """
    kind = _kind_of(container)
    if issubclass(kind, dict):
        return dict(kind.items(container))
    return (set if kind is set else list)(kind.__iter__(container))


def refill(container: Any, content: Any) -> None:
    """Give a list, deque, dict or set the `contents` it had, past a subclass's own methods."""
    kind = _kind_of(container)
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    elif kind is set:
        kind.update(container, content)
    else:
        kind.extend(container, content)


def _kind_of(container: Any) -> Any:
    return next(kind for kind in _REFILLED if isinstance(container, kind))


_LEFT = "_graphshard_left"


def mark_left(tensor: Any) -> None:
    """Mark a tensor that a call left in Python state."""
    if isinstance(tensor, torch.Tensor):
        vars(tensor)[_LEFT] = True


def is_left(value: Any) -> bool:
    """Whether it is a tensor that a call left in Python state."""
    return isinstance(value, torch.Tensor) and _LEFT in vars(value)
