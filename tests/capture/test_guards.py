"""Guards compare what a forward read with what is there now; a watch notices that it may differ."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from graphshard.capture.code_walk import CodeWalk
from graphshard.capture.guards import MISSING, Guards, Place, Version, Watch, frozen

NAN = float("nan")
FACTOR = 2.0
UNREAD = 3.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ("1", b"1"),
        ([1], (1,)),
        ([0.0], [-0.0]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [1]}, {"a": [True]}),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
        (object(), object()),
        (None, MISSING),
    ],
)
def test_values_that_differ(one: Any, other: Any) -> None:
    assert frozen(one) != frozen(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: [1, {"a": (float("nan"), None)}, {2, 3}],
        lambda: OrderedDict(a=deque([1])),
        lambda: types.SimpleNamespace(a=[1]),
        lambda: torch.Size([1, 2]),
        lambda: slice(1, 2),
    ],
)
def test_values_made_twice_are_equal(make: Any) -> None:
    assert frozen(make()) == frozen(make())


class Slotted:
    __slots__ = ("value",)


def _slotted(value: Any) -> tuple[Place, Any]:
    owner = Slotted()
    owner.value = value
    return Place("s.value", owner, "value"), lambda new: setattr(owner, "value", new)


def _entry(value: Any) -> tuple[Place, Any]:
    owner = {"value": value}
    return Place("d", owner, "value"), lambda new: owner.__setitem__("value", new)


def _of_class(value: Any) -> tuple[Place, Any]:
    owner = type("Owner", (), {"value": value})
    return Place("Owner.value", owner, "value"), lambda new: setattr(owner, "value", new)


def _cell(value: Any) -> tuple[Place, Any]:
    cell = types.CellType(value)
    return Place("f.value", cell), lambda new: setattr(cell, "cell_contents", new)


@pytest.mark.parametrize("make", [_slotted, _entry, _of_class, _cell])
def test_guards_and_watch_see_a_place_change_and_change_back(make: Any) -> None:
    place, change = make(1.5)
    guards, watch = Guards.of([place]), Watch()
    watch.add(guards)
    assert guards.hold()
    assert not watch.changed(0)
    change(2.5)
    assert watch.changed(0)
    assert not watch.changed(0)
    assert not guards.hold()
    assert guards.broken() == f"{place.path}: 1.5 -> 2.5"
    change(1.5)
    assert watch.changed(0)
    assert guards.hold()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, [2]], lambda v: v[1].append(3)),
        ([1, 2], lambda v: v.pop()),
        ([1, 2], lambda v: v.reverse()),
        ({"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
        ({"a": 1}, lambda v: v.update(c=2)),
        ({1, 2}, lambda v: v.add(3)),
        (deque([1, 2]), lambda v: v.rotate()),
        (types.SimpleNamespace(a=1), lambda v: setattr(v, "a", 2)),
        (([1],), lambda v: v[0].append(2)),
    ],
)
def test_what_is_inside_of_containers_is_seen(value: Any, change: Any) -> None:
    guards, watch = Guards.of([Place("self.x", {"x": value}, "x", of_module=True)]), Watch()
    watch.add(guards)
    assert guards.hold()
    assert not watch.changed(0)
    change(value)
    assert watch.changed(0)
    assert not guards.hold()


def test_items_that_wander_between_neighbours_are_seen() -> None:
    one, two = [1, 2], [3]
    watch = Watch()
    watch.add(Guards.of([Place("x", {"x": (one, two)}, "x")]))
    two.insert(0, one.pop())
    assert watch.changed(0)


def test_attributes_of_modules_are_counted_and_not_looked_at() -> None:
    attributes = {"x": 1}
    watch = Watch()
    watch.add(Guards.of([Place("x", attributes, "x", of_module=True)]))
    attributes["x"] = 2
    assert not watch.changed(0)
    assert watch.changed(1)
    assert not watch.changed(1)


def test_writes_into_a_tensor_are_seen() -> None:
    tensor = torch.ones(2)
    guards = Guards.of([Version("t", tensor)])
    tensor.add_(1)
    assert not guards.hold()


def _helper(x: Any) -> Any:
    return x.UNREAD * FACTOR


class Net(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return self.twice(x) if x is not None else x

    def twice(self, x: Any) -> Any:
        return [_helper(each) for each in (x, x)]


class Comparing(Net):
    def twice(self, x: Any) -> Any:
        return x if x is self else [y for y in x if y is not x]


def test_the_walk_follows_methods_and_helpers_to_globals() -> None:
    walk = CodeWalk.of(Net())
    assert [place.path for place in walk.places] == [f"{__name__}.FACTOR"]
    assert not walk.compares_identity
    assert CodeWalk.of(Comparing()).compares_identity
