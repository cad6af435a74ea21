"""The cache of keys and values that a model of transformers gives each block, to fill a layer of.

Such a call changes an argument, and reads the number of its layer, by which no other call is like
it. Here the cache is no argument, and what a call puts there is part of what it returns. In the
first run of a trace the call is watched: if it does anything with cache or number but to fill an
empty layer, it is as it was. The nodes of the graph are those of the second run, as in eager.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from graphshard.capture.code_walk import in_library
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
    _fills: list[str] = field(default_factory=list)
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
    def watched(self, modules: Mapping[str, nn.Module], known: Filled | None) -> Iterator[None]:
        """A call of a block of these `modules`, at whose end `filled` is set.

        known: what calls of its kind fill; None: the call is the first of it, and watched.
        """
        layers, attributes = [*self.value.layers], dict(vars(self.value))
        before = [dict(vars(layer)) for layer in layers]
        self.filled, self._fills, self._looked_at = None, [], False
        if known is None:
            with self._telling(modules):
                yield
        else:
            yield
            self._fills.append(known.path)
        if self._looked_at or len(self._fills) != 1 or not _same(vars(self.value), attributes):
            return
        (path,) = self._fills
        place, now = vars(modules[path])[NUMBER], [*self.value.layers]
        if len(now) == len(layers) + 1 == place + 1:
            layers.append(now[-1])
            before.append({"is_initialized": False})
        others = [each for each in range(len(layers)) if each != place]
        if (
            place < len(now)
            and [*map(id, now)] == [*map(id, layers)]
            and _is_plain(type(now[place]))
            and not before[place]["is_initialized"]
            and all(_same(vars(now[each]), before[each]) for each in others)
        ):
            layer = vars(now[place])
            names = tuple(name for name, value in layer.items() if isinstance(value, Tensor))
            plain = {name: value for name, value in layer.items() if name not in names}
            self.filled = Filled(path, names, plain)

    @contextlib.contextmanager
    def _telling(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Cache and numbers tell what is done with them."""
        cache, kind = self.value, type(self.value)
        inside: list[Any] = []
        read: Any = kind.__getattribute__
        fill: Any = kind.update

        def __getattribute__(owner: Any, name: str) -> Any:  # noqa: N807
            if owner is cache and not inside and name not in ("update", "__class__"):
                self.note_look()
            return read(owner, name)

        def update(
            owner: Any,
            key_states: Any,
            value_states: Any,
            layer_idx: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if owner is cache and type(layer_idx) is _Number:
                self._fills.append(layer_idx.path)
                layer_idx = layer_idx.value
            elif owner is cache:
                self.note_look()
            inside.append(owner)
            try:
                return fill(owner, key_states, value_states, layer_idx, *args, **kwargs)
            finally:
                inside.pop()

        self._looked_at = any(map(_asks_for_types, modules.values()))
        numbers = [
            (vars(module), _Number(vars(module)[NUMBER], path, self))
            for path, module in modules.items()
            if type(vars(module).get(NUMBER)) is int
        ]
        for table, number in numbers:
            table[NUMBER] = number
        try:
            with (
                patched(kind, "__getattribute__", __getattribute__),
                patched(kind, "update", update),
            ):
                yield
        finally:
            for table, number in numbers:
                self._looked_at |= table.get(NUMBER) is not number  # it was assigned
                if table.get(NUMBER) is number:
                    table[NUMBER] = number.value

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

    def note_look(self) -> None:
        """Note that a call does something else with the cache, or with the number of its layer."""
        self._looked_at = True


def _is_plain(kind: Any) -> bool:
    """Whether layers of a class keep all keys and values, and nothing else."""
    return kind is sys.modules["transformers.cache_utils"].DynamicLayer


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)


def _asks_for_types(module: nn.Module) -> bool:
    """Whether a method uses the number of its layer, and `type`, which no number can tell."""
    methods = (
        inspect.unwrap(value)
        for base in type(module).__mro__
        for name, value in vars(base).items()
        if inspect.isfunction(value) and name != "__init__"
    )
    return any({NUMBER, "type"} <= {*method.__code__.co_names} for method in methods)


class _Number:
    """The number of a layer, which tells a `watch` if it is looked at."""

    def __init__(self, value: int, path: str, watch: KVCache) -> None:
        self.value, self.path, self.watch = value, path, watch

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # of which isinstance asks
        if not in_library(sys._getframe(1).f_globals.get("__name__")):
            self.watch.note_look()
        return int

    def __getattr__(self, name: str) -> Any:
        self.watch.note_look()
        return getattr(self.value, name)


def _looking(name: str) -> Any:
    def method(self: _Number, *args: Any) -> Any:
        self.watch.note_look()
        numbers = [each.value if type(each) is _Number else each for each in args]
        return getattr(self.value, name)(*numbers)

    return method


_ALSO = {
    f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "repr", "str", "format")
}

for _name in {name for name in vars(int) if name.startswith("__")} - {*vars(object)} | _ALSO:
    if _name != "__getnewargs__":
        setattr(_Number, _name, _looking(_name))
