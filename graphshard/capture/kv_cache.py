"""The cache of keys and values that a model of transformers gives each block, to fill a layer of.

Such a call changes an argument, and reads the number of its layer, by which no other call is like
it. Here the cache is no argument, and what a call puts there is part of what it returns. The call
is watched: if it does anything with cache or number but to fill an empty layer, it is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from graphshard.torch_private.patches import patched

NUMBER = "layer_idx"
"""The attribute of a module that is the number of its layer."""

_IN_PLACE = "the cache of keys and values"


@dataclass(frozen=True)
class Filled:
    """What a call put into an empty layer of the cache.

    path: in the block, that of the module that has the number of the layer.
    names: the attributes of the layer that are tensors. others: those that are not.
    """

    path: str
    names: tuple[str, ...]
    others: Mapping[str, Any]


@dataclass
class KVCache:
    """A cache that a call gets as an argument.

    filled: what the last call put there, if that is all it did with it.
    """

    value: Any
    filled: Filled | None = None
    _updates: list[Any] = field(default_factory=list)
    _looked_at: bool = False

    @staticmethod
    def among(values: Sequence[Any]) -> KVCache | None:
        """The only one among arguments; None if there is none, or several."""
        library: Any = sys.modules.get("transformers.cache_utils")
        kind = getattr(library, "DynamicCache", None)
        caches = {id(value): value for value in values if kind is not None and type(value) is kind}
        found = [*caches.values()]
        return KVCache(found[0]) if len(found) == 1 and not found[0].offloading else None

    def taken_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments without it."""
        return self._swapped(args, kwargs, self.value, _IN_PLACE)

    def put_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments with it."""
        return self._swapped(args, kwargs, _IN_PLACE, self.value)

    def _swapped(self, args: Any, kwargs: Any, old: Any, new: Any) -> Any:
        def swap(value: Any) -> Any:
            return new if value is old else value

        return tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}

    @contextlib.contextmanager
    def watched(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch a call of a block of these `modules`, and set `filled` at its end."""
        cache = self.value
        layers, attributes = [*cache.layers], dict(vars(cache))
        before = [dict(vars(layer)) for layer in layers]
        self.filled, self._updates, self._looked_at = None, [], False
        tables = {path: vars(module) for path, module in modules.items()}
        numbers = {path: table[NUMBER] for path, table in tables.items() if NUMBER in table}
        with contextlib.ExitStack() as patches:
            patches.enter_context(patched(cache, "__class__", _watched(type(cache), self)))
            for path, number in numbers.items():
                told = _Number(number, path, self)
                patches.enter_context(patched(tables[path], NUMBER, told, where=NUMBER))
            yield
        if self._looked_at or len(self._updates) != 1 or not _same(vars(cache), attributes):
            return
        (path,) = self._updates
        place, now = numbers[path], [*cache.layers]
        if len(now) == len(layers) + 1 == place + 1:
            layers.append(now[-1])
            before.append({"is_initialized": False})
        others = [each for each in range(len(layers)) if each != place]
        if (
            [*map(id, now)] == [*map(id, layers)]
            and _is_plain(type(now[place]))
            and not before[place]["is_initialized"]
            and all(_same(vars(now[each]), before[each]) for each in others)
        ):
            layer = vars(now[place])
            names = tuple(name for name, value in layer.items() if isinstance(value, Tensor))
            plain = {name: value for name, value in layer.items() if name not in names}
            self.filled = Filled(path, names, plain)

    def tensors(self, modules: Mapping[str, nn.Module]) -> list[Tensor]:
        """Those that the last call of a block of these `modules` put there."""
        if self.filled is None:
            return []
        layer = vars(self.value.layers[vars(modules[self.filled.path])[NUMBER]])
        return [layer[name] for name in self.filled.names]

    def fill(
        self, modules: Mapping[str, nn.Module], filled: Filled, tensors: Sequence[Tensor]
    ) -> None:
        """Put `tensors` where a call of a block of these `modules` puts its own."""
        layers, place = self.value.layers, vars(modules[filled.path])[NUMBER]
        if place == len(layers):
            layers.append(self.value.layer_class_to_replicate())
        vars(layers[place]).update(copy.deepcopy(filled.others))
        vars(layers[place]).update(zip(filled.names, tensors, strict=True))

    def is_empty_at(self, modules: Mapping[str, nn.Module], filled: Filled) -> bool:
        """Whether a call of a block of these `modules` would find its layer empty."""
        layers, place = self.value.layers, vars(modules[filled.path]).get(NUMBER)
        if type(place) is not int or not 0 <= place <= len(layers):
            return False
        if place == len(layers):
            return _is_plain(self.value.layer_class_to_replicate)
        return _is_plain(type(layers[place])) and not layers[place].is_initialized

    def note_update(self, number: Any) -> int:
        """Note that a call fills the layer of a `number`; returns it as an int."""
        if isinstance(number, _Number):
            self._updates.append(number.path)
            return number.value
        self._looked_at = True
        return int(number)

    def note_look(self) -> None:
        """Note that a call does something else with the cache, or with the number of its layer."""
        self._looked_at = True


def _is_plain(kind: Any) -> bool:
    """Whether layers of a class keep all keys and values, and nothing else."""
    return kind is sys.modules["transformers.cache_utils"].DynamicLayer


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)


def _watched(kind: type, watch: KVCache) -> Any:
    """A class whose instances tell `watch` what is done with them."""
    inside: list[bool] = []

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if not inside and name not in ("update", "__class__"):  # of which isinstance asks
            watch.note_look()
        return super(watched, self).__getattribute__(name)

    def update(self: Any, keys: Any, values: Any, number: Any, *args: Any, **kwargs: Any) -> Any:
        number = watch.note_update(number)
        inside.append(True)
        try:
            return super(watched, self).update(keys, values, number, *args, **kwargs)
        finally:
            inside.pop()

    methods = {"__getattribute__": __getattribute__, "update": update}
    watched: Any = type(kind.__name__, (kind,), methods)
    return watched


class _Number:
    """The number of a layer, which tells a `watch` if it is looked at."""

    def __init__(self, value: int, path: str, watch: KVCache) -> None:
        self.value, self.path, self.watch = value, path, watch


def _looking(name: str) -> Any:
    def method(self: _Number, *args: Any) -> Any:
        self.watch.note_look()
        numbers = [each.value if isinstance(each, _Number) else each for each in args]
        return getattr(self.value, name)(*numbers)

    return method


_COMPARISONS = {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash")}

_TEXTS = {"__repr__", "__str__", "__format__"}

for _name in ({*vars(int)} - {*vars(object), "__getnewargs__"}) | _COMPARISONS | _TEXTS:
    setattr(_Number, _name, _looking(_name))
