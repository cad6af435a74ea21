"""The Python state that a captured program depends on: where it was read, and the value there.

A program keeps the values that the forward read: attributes of modules and of objects that they
hold, globals, the cells of closures. It is right only as long as those places hold the same values.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch

from graphshard.capture.places import MISSING, Assignment, Contents, Place, Version, is_left
from graphshard.capture.structure import Same

CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_NESTED = (*CONTAINERS, types.SimpleNamespace)

_PLAIN = frozenset({
    type(None), bool, int, str, bytes, range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
})  # fmt: skip

_LONGEST = 1024
"""The items of longer containers do not count: a look at them would take too long."""

_DEEPEST = 8


def frozen(
    value: Any,
    depth: int = 0,
    by_properties: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> Any:
    """`value` in a form to compare: containers and plain values by content, others by identity.

    Values of different types differ (1 and True), as do 0.0 and -0.0; a NaN equals another. A
    tensor counts by identity, or by its properties if `by_properties` says so.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if kind is partial:
        value = value.func, value.args, value.keywords
    if isinstance(value, torch.Tensor) and by_properties(value):
        return _AnyTensor(value)
    if not isinstance(value, CONTAINERS) or depth == _DEEPEST:
        return Same(value)
    inner = (frozen(each, depth + 1, by_properties) for each in items_of(value))
    return kind, (frozenset if isinstance(value, (set, frozenset)) else tuple)(inner)


class _AnyTensor:
    """Equals the form of any tensor with the properties of `tensor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.properties = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Same) and isinstance(other.value, torch.Tensor):
            other = _AnyTensor(other.value)
        return isinstance(other, _AnyTensor) and self.properties == other.properties

    def __hash__(self) -> int:
        return hash(_AnyTensor)


def containers_in(value: Any) -> list[Any]:
    """`value` if it is a container, and those inside of it, up to a number; a namespace's dict."""
    containers: list[Any] = []
    reached = [value]
    for each in reached:
        inner = vars(each) if isinstance(each, types.SimpleNamespace) else each
        if isinstance(inner, CONTAINERS) and len(inner) <= _LONGEST:
            containers.append(inner)
            if len(reached) <= _LONGEST:
                reached += [item for item in items_of(inner) if isinstance(item, _NESTED)]
    return containers


def items_of(container: Any) -> tuple[Any, ...]:
    """The contents of `container` (keys, then values, of a dict); if it is long, only its length.

    A class's own methods, which may load what is not there yet, are not called.
    """
    kind = next(base for base in CONTAINERS if isinstance(container, base))
    length: int = kind.__len__(container)
    if length > _LONGEST:
        return (length,)
    if kind is dict:
        return (*dict.__iter__(container), *dict.values(container))
    return tuple(kind.__iter__(container))


@dataclass(frozen=True)
class Guards:
    """Places, and the values there that a program was captured with, in the form to compare.

    used: tensors that forward computed with, so that no others may be in their places. A tensor
        that it did not compute with, and that a call left or will replace, may be any like it.
    """

    places: tuple[Place | Version, ...] = ()
    frozen: tuple[Any, ...] = field(default=(), repr=False)
    used: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @staticmethod
    def of(
        places: Iterable[Place | Version],
        used: Iterable[torch.Tensor] = (),
        written: Iterable[Contents] = (),
    ) -> Guards:
        """The guards on what `places` hold now; `written`: containers that each call writes."""
        distinct = tuple({place.identity: place for place in places}.values())
        guards = Guards(distinct, used=tuple(used))
        theirs = {id(item) for place in written for item in items_of(place.owner)}
        forms = tuple(
            frozen(
                place.read(),
                by_properties=lambda t: not guards.uses(t) and (is_left(t) or id(t) in theirs),
            )
            for place in distinct
        )
        return replace(guards, frozen=forms)

    def uses(self, tensor: torch.Tensor) -> bool:
        """Whether forward computed with it."""
        return any(tensor is each for each in self.used)

    def carries(self, value: Any) -> bool:
        """Whether `value` is or holds a tensor that a call left and forward computed with."""
        reached = [value, *chain.from_iterable(map(items_of, containers_in(value)))]
        return any(is_left(each) and self.uses(each) for each in reached)

    def and_of(self, other: Guards) -> Guards:
        """The guards of both, on what their places hold now."""
        return Guards.of((*self.places, *other.places), (*self.used, *other.used))

    def also_after(self, assignments: Iterable[Assignment]) -> Guards:
        """Guards that hold before and after `assignments`."""
        new = {each.place.identity: frozen(each.value) for each in assignments}
        pairs = zip(self.places, self.frozen, strict=True)
        forms = (
            _Either(form, new[place.identity]) if place.identity in new else form
            for place, form in pairs
        )
        return replace(self, frozen=tuple(forms))

    def hold(self) -> bool:
        """Whether all places hold what they held."""
        return next(self._broken(), None) is None

    def broken(self) -> str:
        """The first place that holds something else, with both values; "" if none does."""
        for place, then, now in self._broken():
            return f"{place.path}: {_shown(then)} -> {_shown(now)}"
        return ""

    def _broken(self) -> Iterator[tuple[Place | Version, Any, Any]]:
        for place, form in zip(self.places, self.frozen, strict=True):
            now = place.read()
            if frozen(now) != form:
                yield place, form, now


class _Either:
    """Equals both of two forms."""

    def __init__(self, *forms: Any) -> None:
        self.forms = forms

    def __eq__(self, other: object) -> bool:
        return other in self.forms

    __hash__ = None  # type: ignore[assignment]  # it equals forms of several hashes


def _shown(value: Any) -> str:
    if isinstance(value, _Either):
        return " or ".join(map(_shown, value.forms))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = value[1]  # a frozen one
        return value if isinstance(value, str) else repr(value)[:60]
    value = value.value if isinstance(value, Same) else value
    plain = type(value) in _PLAIN or value is MISSING or isinstance(value, (float, *CONTAINERS))
    return repr(value)[:60] if plain else f"a {type(value).__name__}"


class Watch:
    """Notices that state which some program reads may have changed since the last call.

    A look compares identities only, and takes some tens of nanoseconds for each place. Attributes
    of modules are not looked at, unless calls change them: a sharded module counts their changes.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], Place | Version] = {}
        self._left: set[tuple[int, Any]] = set()
        self._count = 0
        self._remember()

    def add(self, guards: Guards, left: Iterable[Any] = ()) -> None:
        """Watch the places of `guards`, too, and that calls leave tensors in those of `left`."""
        self._left |= {place.identity for place in left if isinstance(place, Place)}
        self._places |= {place.identity: place for place in guards.places}
        self._remember()

    def changed(self, count: int) -> bool:
        """Whether anything may have changed; `count`: of the changes of modules' attributes."""
        if count == self._count and self._is_as_before():
            return False
        self._count = count
        self._remember()
        return True

    def _is_as_before(self) -> bool:
        for owner, key, value in self._entries:
            if owner.get(key, MISSING) is not value:
                return False
        for place, value in self._others:
            if place.read() is not value:
                return False
        return self._lengths() == self._all_lengths and all(
            map(is_, self._items(), self._all_items)
        )

    def _lengths(self) -> list[int]:
        return [
            *map(list.__len__, self._lists),
            *map(dict.__len__, self._dicts),
            *map(len, self._rest),
        ]

    def _items(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(map(list.__iter__, self._lists)),
            chain.from_iterable(map(dict.__iter__, self._dicts)),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(map(items_of, self._rest)),
        )

    def _remember(self) -> None:
        self._entries: list[tuple[Mapping[Any, Any], Any, Any]] = []
        self._others: list[tuple[Place | Version, Any]] = []
        containers: dict[int, Any] = {}
        for place in self._places.values():
            value = place.read()
            containers |= {id(each): each for each in containers_in(value)}
            if place.of_module and place.identity not in self._left:
                continue
            if place.entries is None:
                self._others.append((place, value))
            else:
                self._entries.append((place.entries, place.key, value))
        mutable = [c for c in containers.values() if not isinstance(c, (tuple, frozenset))]
        self._lists = [c for c in mutable if isinstance(c, list)]
        self._dicts = [c for c in mutable if isinstance(c, dict)]
        self._rest = [c for c in mutable if not isinstance(c, (list, dict))]
        self._all_lengths = self._lengths()
        self._all_items = list(self._items())
