"""The globals and closures that the code of a forward names, found without running it."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from graphshard.capture.places import Place

_LIBRARIES = frozenset({"torch", "numpy", "graphshard", "triton", *sys.stdlib_module_names})

_OF_ANY_CLASS = ("__init__", "__call__", "forward", "backward", "setup_context")

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")

_TABLES = frozenset({"vars", "__dict__", "__getattribute__", "getattr_static", "attrgetter"})

_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, staticmethod,
    classmethod, property, functools.partial, types.MethodType,
)  # fmt: skip


_NO_STATE = (type(None), bool, int, float, str, bytes)

_HOOKS = (types.FunctionType, types.MethodType)


def in_library(module_name: Any) -> bool:
    """Whether code of this module is taken to keep no state that a forward depends on."""
    return not isinstance(module_name, str) or module_name.partition(".")[0] in _LIBRARIES


class CodeWalk:
    """Follows names from function to function, through methods and closures.

    places: the globals, class attributes and cells on the way that hold data. What torch, numpy and
        the standard library define is left out.
    compares_identity: some code on the way compares objects by `is`, other than with None.
    reads_tables: some code may read attributes past their names, as by `vars(self)`.
    """

    def __init__(self, methods: Iterable[str] = ("forward",)) -> None:
        self.places: list[Place] = []
        self.compares_identity = self.reads_tables = False
        self._methods = (*methods, *_OF_ANY_CLASS)
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []

    @staticmethod
    def of(model: nn.Module, method: str = "forward") -> CodeWalk:
        """The walk from `method` of the classes of `model` and from the functions it holds."""
        roots: dict[int, Any] = {}
        for module in model.modules():
            kind = type(module)
            if not in_library(kind.__module__):
                roots |= {id(kind): kind}
            for value in vars(module).values():  # hooks are in dicts
                held = value.values() if type(value) in (dict, OrderedDict) else (value,)
                roots |= {id(each): each for each in held if isinstance(each, _HOOKS)}
        walk = CodeWalk((method,))
        for module in model.modules():
            for table in (module._forward_pre_hooks, module._forward_hooks):
                walk.places += [
                    Place(getattr(hook, "__qualname__", type(hook).__name__), table, key)
                    for key, hook in table.items()
                    if not isinstance(hook, types.FunctionType)
                ]
        for root in roots.values():
            walk.follow(root)
        return walk

    @property
    def modules(self) -> set[str]:
        """Names of the modules of the functions on the way."""
        return {function.__module__ for function in self._kept}

    def follow(self, value: Any, owner: type | None = None, names: Iterable[str] = ()) -> None:
        """Walk the code of `value`: a function, a method of `owner`, or an object around one.

        A class is walked by its methods in `names`, and by those through which any class is called.
        """
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.FunctionType):
            self._function(value, owner)
        elif isinstance(value, type) and not in_library(value.__module__):
            for name in {*names, *self._methods}:
                self._method(value, name)

    def _method(self, owner: type, name: str) -> None:
        for kind in owner.__mro__:
            if name in vars(kind):
                if not in_library(kind.__module__):
                    self.follow(vars(kind)[name], owner)
                return

    def _function(self, function: types.FunctionType, owner: type | None) -> None:
        key = (id(function), id(owner))
        if key in self._seen or in_library(function.__module__):
            return
        self._seen.add(key)
        self._kept.append(function)
        for cell_name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            if cell_name != "__class__":
                place = Place(f"{function.__qualname__}.{cell_name}", cell)
                self._value(place, place.read(), owner, ())
        for kind in ("__defaults__", "__kwdefaults__"):  # of arguments
            if not _is_plain(getattr(function, kind)):
                self.places.append(Place(f"{function.__qualname__}.{kind}", function, kind))
        names = _names_in(function.__code__)
        self.compares_identity |= names.compares
        self.reads_tables |= not _TABLES.isdisjoint((*names.globals_, *names.attributes))
        for name in names.globals_ & function.__globals__.keys():
            place = Place(f"{function.__module__}.{name}", function.__globals__, name)
            self._value(place, place.read(), None, names.attributes)
        if owner is not None:
            for name in names.attributes:
                self._method(owner, name)

    def _value(self, place: Place, value: Any, owner: type | None, names: Iterable[str]) -> None:
        if not isinstance(value, _CODE):
            if not isinstance(value, nn.Module):
                self.places.append(place)
            return
        if isinstance(value, type) and not in_library(value.__module__):
            self._members(value.__qualname__, value, vars(value), names)
        if isinstance(value, types.ModuleType) and not in_library(value.__name__):
            self._members(value.__name__, value.__dict__, vars(value), names)
        self.follow(value, owner, names)

    def _members(self, path: str, owner: Any, members: Any, names: Iterable[str]) -> None:
        for name in names:
            value = members.get(name)
            if isinstance(owner, dict) and isinstance(value, _CODE):
                if not isinstance(value, types.ModuleType):
                    self.follow(value)
            elif name in members and not hasattr(type(value), "__get__"):
                self.places.append(Place(f"{path}.{name}", owner, name))


def _is_plain(defaults: Any) -> bool:
    values = defaults.values() if isinstance(defaults, dict) else defaults or ()
    return all(isinstance(value, (*_CODE, *_NO_STATE)) for value in values)


@dataclass(frozen=True)
class _Names:
    """The names that code takes from globals, those of attributes, and whether it compares by `is`.

    Comparisons with constants such as None do not count.
    """

    globals_: frozenset[str]
    attributes: frozenset[str]
    compares: bool


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    instructions = list(dis.get_instructions(code))
    globals_ = {each.argval for each in instructions if each.opname in _GLOBAL}
    attributes = set(code.co_names) - globals_
    attributes |= {each.argval for each in instructions if each.opname in _ATTRIBUTE}
    compares = "id" in globals_ or any(
        each.opname == "IS_OP" and "CONST" not in before.opname
        for before, each in pairwise(instructions)
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            globals_ |= inner.globals_
            attributes |= inner.attributes
            compares |= inner.compares
    return _Names(frozenset(globals_), frozenset(attributes), compares)
