"""Noting what a forward reads of Python state, and undoing what it changes there."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import random
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.code_walk import in_library
from graphshard.capture.guards import containers_in, items_of
from graphshard.capture.places import MISSING, Place, Version, contents, refill
from graphshard.capture.side_effects import (
    TABLES,
    Effects,
    content_differs,
    differs,
)
from graphshard.errors import CaptureError, user_line_here
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.patches import patched

OF_ANY_MODULE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes of every module; an instance has a forward of its own while its calls are watched."""

_METHODS = frozenset(dir(nn.Module)) - OF_ANY_MODULE

_PATCHABLE = frozenset({"argparse"})
"""Modules of the standard library whose classes hold users' settings."""

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")


class Reads:
    """The state that one forward read and changed: of modules, of objects they hold, and globals.

    Classes of those objects note their attributes' reads meanwhile. Containers are compared whole.

    places: where it read.
    effects: what it changed besides attributes of modules, which is undone.
    writes: how often it assigned an attribute of a module or object.
    looks: how often it looked at where a tensor is from, or hung a hook on one.
    used: plain tensors, with values, that it computed with.
    draws: random generators of its own that it drew from.
    drawn: what it drew from those of the host.
    clocks: functions of `time` that it called, with a source line each.
    """

    def __init__(self, model: nn.Module, globals_: Iterable[Place]) -> None:
        self.places: list[Place | Version] = []
        self.effects = Effects()
        self.used: list[Tensor] = []
        self.writes = self.looks = 0
        self.draws: list[str] = []
        self.drawn: Sequence[Any] = ()
        self.clocks: dict[str, str] = {}
        self._lines: dict[str, str] = {}  # of assignments, by path
        self._fqns = {id(module): fqn for fqn, module in model.named_modules()}
        self._globals = globals_
        self._seen: set[tuple[int, str]] = set()
        self._paths: dict[int, str] = {}  # of objects that modules and globals hold
        self._objects: list[tuple[Any, dict[str, Any]]] = []  # with their attributes as they were
        self._containers: dict[int, tuple[Any, str, Any]] = {}  # container, path, copy
        self._shared: list[tuple[Place, Any]] = []  # globals, cells and attributes of classes
        self._states: dict[int, _State] = {}
        self._unanswered: Exception | None = None
        self._patches = contextlib.ExitStack()
        self._patched: set[type] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note reads, and undo changes at the end."""
        with self._patches:
            self._patch(nn.Module, self._note_module, self._fqns)
            for name in _CLOCKS:
                self._patch_clock(name)
            self._patch_truth(torch.SymBool)
            for place in self._globals:
                self._add_shared(place)
            try:
                yield
            finally:
                self._compare_and_restore()
        self._require_iterators()
        if self._unanswered is not None:  # the model caught it
            raise self._unanswered

    # -- noting -------------------------------------------------------------------------------

    def _patch(self, kind: type, note: Callable[[Any, str], None], known: dict[int, str]) -> None:
        read: Any = kind.__getattribute__
        write: Any = kind.__setattr__

        def __getattribute__(owner: Any, name: str) -> Any:  # noqa: N807
            if id(owner) in known and (id(owner), name) not in self._seen:
                note(owner, name)
            return read(owner, name)

        def __setattr__(owner: Any, name: str, value: Any) -> None:  # noqa: N807
            if id(owner) in known:
                self.writes += 1
                self._lines.setdefault(_joined(known[id(owner)], name), user_line_here() or "")
                self._seen.add((id(owner), name))  # what is read later is of this forward
            write(owner, name, value)

        for new in (__getattribute__, __setattr__):
            self._patches.enter_context(patched(kind, new.__name__, new))

    def _patch_clock(self, name: str) -> None:
        clock = getattr(time, name)

        def read() -> Any:
            if not in_library(sys._getframe(1).f_globals.get("__name__")):
                self.clocks.setdefault(f"time.{name}", user_line_here() or "")
            return clock()

        self._patches.enter_context(patched(time, name, read))

    def _patch_truth(self, kind: type) -> None:
        truth: Any = kind.__bool__  # type: ignore[attr-defined]

        def __bool__(value: Any) -> bool:  # noqa: N807
            try:
                return bool(truth(value))
            except torch_trace.untraceable_errors()[0] as error:  # which a model may catch
                if not in_library(sys._getframe(1).f_globals.get("__name__")):
                    self._unanswered = self._unanswered or error
                raise

        self._patches.enter_context(patched(kind, "__bool__", __bool__))

    def attributes_of(self, paths: Mapping[int, str]) -> list[tuple[str, str]]:
        """What was read so far of the modules with the ids in `paths`, as (path, attribute)."""
        return [
            (paths[owner], name)
            for owner, name in sorted(self._seen)
            if owner in paths and name not in OF_ANY_MODULE
        ]

    def note(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is read, if it is not known yet."""
        if (id(module), name) not in self._seen:
            self._note_module(module, name)

    def _note_module(self, module: nn.Module, name: str) -> None:
        self._seen.add((id(module), name))
        attributes = vars(module)
        of_class = name in _METHODS and name not in attributes
        if of_class or name in OF_ANY_MODULE or any(name in attributes[t] for t in TABLES):
            return
        path = _joined(self._fqns[id(module)], name)
        self._add(Place(path, attributes, name, of_module=True), attributes.get(name, MISSING))
        if name not in attributes:
            self._add_of_class(type(module), name)

    def _note_object(self, owner: Any, name: str) -> None:
        self._seen.add((id(owner), name))
        if name.startswith("__"):
            return
        attributes = _attributes(owner)
        path = _joined(self._paths[id(owner)], name)
        if attributes is not None:
            self._add(Place(path, attributes, name), attributes.get(name, MISSING))
        if attributes is None or name not in attributes:
            slot = getattr(type(owner), name, None)
            if isinstance(slot, types.MemberDescriptorType):
                place = Place(path, owner, name)
                self._add(place, place.read())
            else:
                self._add_of_class(type(owner), name)

    def _add_of_class(self, kind: type, name: str) -> None:
        for base in kind.__mro__:
            if name in vars(base):
                value = vars(base)[name]
                if not in_library(base.__module__) and not hasattr(type(value), "__get__"):
                    self._add_shared(Place(f"{base.__name__}.{name}", base, name))
                return

    def _add_shared(self, place: Place) -> None:
        value = place.read()
        self._shared.append((place, value))
        self._add(place, value)

    def _add(self, place: Place, value: Any) -> None:
        self.places.append(place)
        self._reach(value, place.path)

    def _reach(self, value: Any, path: str) -> None:
        for container in containers_in(value):
            self._lines.setdefault(path, user_line_here() or "")
            if id(container) not in self._containers and not isinstance(
                container, (tuple, frozenset)
            ):
                self._containers[id(container)] = (container, path, contents(container))
            for item in items_of(container):
                self._reach_object(item, path)
        self._reach_object(value, path)

    def _reach_object(self, value: Any, path: str) -> None:
        if isinstance(value, types.MethodType):  # a hook
            value = value.__self__
        kind = type(value)
        if id(value) in self._paths or isinstance(value, (type, nn.Module, Tensor, enum.Enum)):
            return
        state = None if id(value) in self._states else _State.of(value, path)
        if state is not None:
            self._states[id(value)] = state
        elif _is_patchable(kind):
            attributes = _attributes(value)
            self._paths[id(value)] = path
            self._objects.append((value, dict(attributes or {})))
            if kind not in self._patched:
                self._patched.add(kind)
                with contextlib.suppress(TypeError, AttributeError):  # it takes no new attributes
                    self._patch(kind, self._note_object, self._paths)

    def note_values(self, tensor: Tensor) -> None:
        """Note that the values of a plain tensor were read as numbers."""
        shape = ", ".join(map(str, tensor.shape))
        self.places.append(Version(f"the values of a plain tensor of shape [{shape}]", tensor))

    def note_look(self) -> None:
        """Note a look at where a tensor is from, or a hook on one."""
        self.looks += 1

    def at_line(self, *paths: str) -> str:
        """Where the first of `paths` was assigned of which it is known, for a message."""
        return next((f" (at {self._lines[path]})" for path in paths if self._lines.get(path)), "")

    # -- comparing ----------------------------------------------------------------------------

    def _compare_and_restore(self) -> None:
        for place, before in reversed(self._shared):
            if differs(before, place.read()):
                self.effects.add(place, place.read())
                place.write(before)
        for container, path, before in self._containers.values():
            if content_differs(before, container):
                self.effects.add_contents(path, container, before)
                refill(container, before)
        for value, attributes_before in self._objects:
            self._restore_object(value, attributes_before)
        for state in self._states.values():
            if state.write is not None and state.changed():
                self.draws.append(f"{state.path} (a {type(state.value).__name__})")
                state.write(state.before)

    def _restore_object(self, value: Any, before: dict[str, Any]) -> None:
        attributes = _attributes(value)
        if attributes is None:
            return
        changed = [
            name
            for name in {**before, **attributes}
            if differs(before.get(name, MISSING), attributes.get(name, MISSING))
        ]
        now = {name: attributes.get(name) for name in changed}
        if changed:
            refill(attributes, before)
        for name in changed:
            path = _joined(self._paths[id(value)], name)
            if isinstance(getattr(type(value), name, None), functools.cached_property):
                continue
            self.effects.add(Place(path, attributes, name), now[name])

    def _require_iterators(self) -> None:
        for state in self._states.values():
            if state.write is None and state.changed():
                raise CaptureError(
                    f"the forward takes a value from {state.path}, a {type(state.value).__name__}, "
                    "at each call, which a captured program would not repeat; pass the value as "
                    "an argument"
                )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_patchable(kind: type) -> bool:
    if kind.__module__ not in _PATCHABLE and in_library(kind.__module__):
        return False
    # A class of C or a named tuple has nothing to note; a function is no state.
    return bool(kind.__flags__ & 1 << 9) and not issubclass(kind, (tuple, types.FunctionType))


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes


@dataclass(frozen=True)
class _State:
    """The state of a random generator or iterator, which can be read, and of the first also set."""

    path: str
    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    before: Any

    @staticmethod
    def of(value: Any, path: str) -> _State | None:
        """None if `value` is neither."""
        numpy: Any = sys.modules.get("numpy")
        if isinstance(value, random.Random):
            return _State(path, value, value.getstate, value.setstate, value.getstate())
        if numpy is not None and isinstance(value, numpy.random.RandomState):
            return _State(path, value, value.get_state, value.set_state, value.get_state())
        if numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return _State(
                path, value, lambda: bits.state, lambda s: setattr(bits, "state", s), bits.state
            )
        is_iterator = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
        if is_iterator and in_library(type(value).__module__):
            return _State(path, value, lambda: _position(value), None, _position(value))
        return None

    def changed(self) -> bool:
        return repr(self.read()) != repr(self.before)


def _position(iterator: Any) -> Any:
    """Where an iterator stands, to compare."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else frame.f_lasti
    if isinstance(iterator, tuple):
        return tuple(map(_position, iterator))
    if not hasattr(type(iterator), "__next__"):
        return iterator
    try:
        return tuple(map(_position, iterator.__reduce__()))
    except TypeError:
        return None
