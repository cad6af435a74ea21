"""What forward reads of Python state, inputs and tensors: captured anew, warned of, or refused."""

from __future__ import annotations

import itertools
import random
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stateful_models import (
    LINEAR,
    Base,
    Counter,
    X,
    assert_same,
    count_in_namespace,
    pair,
    with_change,
)
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError, PlanError

FACTOR = 1.0
steps = fc = 0  # named as attributes that forward reads
TABLE = {"factor": 1.0, "calls": 0}


class Options:
    factor = 1.0


OPTIONS = Options()


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


# -- globals, classes and closures ----------------------------------------------------------------


def test_globals_that_change_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sharded = pair(with_change(lambda self, x: helper(x)))
    for factor in (1.0, 2.0, 1.0):
        monkeypatch.setattr(__import__(__name__), "FACTOR", factor)
        assert_same(model, sharded)
    assert len(sharded.programs) == 2


def test_contents_of_globals_and_attributes_of_classes_are_seen() -> None:
    kind = with_change(lambda self, x: x * TABLE["factor"] * OPTIONS.factor * Options.factor)
    model, sharded = pair(kind)
    assert_same(model, sharded)
    try:
        TABLE["factor"] = 2.0
        assert_same(model, sharded)
        Options.factor = 3.0
        assert_same(model, sharded)
        OPTIONS.factor = 5.0
        assert_same(model, sharded)
        assert len(sharded.programs) == 4
    finally:
        TABLE["factor"] = Options.factor = OPTIONS.factor = 1.0
    assert_same(model, sharded)
    del OPTIONS.factor


def test_closures_that_change_are_seen() -> None:
    scale = 1.0

    def change(self: Any, x: Tensor) -> Tensor:
        return x * scale

    model, sharded = pair(with_change(change))
    assert_same(model, sharded)
    scale = 2.0
    assert_same(model, sharded)


def test_closures_of_hooks_are_seen_and_what_they_collect_is_kept() -> None:
    scale, seen = [1.0], []

    def init(self: Any) -> None:
        self.fc.register_forward_hook(lambda module, args, out: out * scale[0])

    model, sharded = pair(with_change(lambda self, x: x, init))
    assert_same(model, sharded)
    scale[0] = 2.0
    assert_same(model, sharded)

    def collect(self: Any) -> None:
        self.fc.register_forward_hook(lambda module, args, out: seen.append(out))

    model, sharded = pair(with_change(lambda self, x: x, collect))
    sharded(X)
    assert len(seen) == 1
    assert torch.equal(seen[0], nn.functional.linear(X, *model.fc.parameters()))


# -- state that forward changes -------------------------------------------------------------------


def _count_in_global(self: Any, x: Tensor) -> Tensor:
    TABLE["calls"] += 1
    return x


def _log(self: Any, x: Tensor) -> Tensor:
    self.state.log.append(1)
    return x * len(self.state.log)


@pytest.mark.parametrize(
    ("change", "make", "named"),
    [
        (count_in_namespace, lambda: types.SimpleNamespace(steps=0), "state"),
        (_log, Counter, r"state\.log"),
        (_count_in_global, Counter, "TABLE"),
    ],
    ids=["a namespace", "a list in an object", "a table"],
)
def test_what_forward_changes_is_said_and_undone(change: Any, make: Any, named: str) -> None:
    state = make()

    def init(self: Any) -> None:
        self.state = state

    torch.manual_seed(0)
    model = with_change(change, init)()
    sharded = graphshard.compile(model, LINEAR)
    with pytest.warns(UserWarning, match=rf"the forward assigns \S*{named}"):
        out = sharded(X)
    assert getattr(state, "steps", 0) == 0
    assert getattr(state, "log", []) == []
    assert TABLE["calls"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(X)
    assert torch.equal(out, model(X))
    TABLE["calls"] = 0


class Registry(dict[str, Any]):
    """Its keys are not what it is given, as those of some registries in libraries are not."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(str(type(key)), value)


class Reversed(OrderedDict[str, Any]):
    def items(self) -> Any:
        return reversed(super().items())


def test_containers_with_methods_of_their_own_are_undone_as_they_were() -> None:
    registry, order = Registry(), Reversed(b=1, a=2)
    registry[1.0] = 3.0
    order.move_to_end("b")

    def change(self: Any, x: Tensor) -> Tensor:
        registry["text"] = 1.0
        order["c"] = 5
        return x * next(iter(registry.values()))

    sharded = graphshard.compile(with_change(change)(), LINEAR)
    with pytest.warns(UserWarning, match="registry"):
        sharded(X)
    assert dict(registry) == {"<class 'float'>": 3.0}
    assert list(order) == ["a", "b"]


def test_globals_with_the_names_of_attributes_are_left_alone() -> None:
    def init(self: Any) -> None:
        self.state = Counter()

    _, sharded = pair(with_change(lambda self, x: x * self.state.steps, init))
    for number in range(3):
        globals()["steps"] = globals()["fc"] = number
        sharded(X)
    assert len(sharded.programs) == 1


@pytest.mark.parametrize(
    ("make", "draw", "kind"),
    [
        (lambda: random.Random(0), lambda r: r.random(), "Random"),
        (lambda: np.random.default_rng(0), lambda r: float(r.random()), "Generator"),
        (lambda: np.random.RandomState(0), lambda r: float(r.rand()), "RandomState"),
    ],
    ids=["random.Random", "numpy's Generator", "numpy's RandomState"],
)
def test_draws_from_own_generators_are_refused(make: Any, draw: Any, kind: str) -> None:
    def init(self: Any) -> None:
        self.random = make()

    _, sharded = pair(with_change(lambda self, x: x * draw(self.random), init))
    with pytest.raises(CaptureError, match=rf"draws random numbers from random \(a {kind}\)"):
        sharded(X)
    assert draw(sharded.random) == draw(make())


def _generator() -> Iterator[int]:
    yield from range(1, 100)


@pytest.mark.parametrize(
    "make",
    [lambda: iter(range(1, 9)), lambda: itertools.count(1), lambda: iter([1, 2, 3]), _generator],
    ids=["range", "count", "list", "generator"],
)
def test_taking_from_an_iterator_is_refused(make: Any) -> None:
    def init(self: Any) -> None:
        self.numbers = make()

    kind = with_change(lambda self, x: x * next(self.numbers), init)
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="takes a value from numbers, a "):
        graphshard.compile(kind(), LINEAR)(X)


def test_reading_the_clock_is_said() -> None:
    _, sharded = pair(with_change(lambda self, x: x * time.time()))
    with pytest.warns(UserWarning, match=r"reads time\.time\(\) \(at .*test_state_read_by"):
        sharded(X)


# -- arguments ------------------------------------------------------------------------------------


def test_minus_zero_is_another_argument_and_nan_is_the_same() -> None:
    model, sharded = pair(with_change(lambda self, x, c: torch.copysign(x, torch.tensor(c))))
    for number in (0.0, -0.0, 0.0):
        assert_same(model, sharded, number)
    assert len(sharded.programs) == 2
    model, sharded = pair(with_change(lambda self, x, c: torch.copysign(x, torch.tensor(c[0]))))
    for number in (0.0, -0.0, 0.0):
        assert_same(model, sharded, [number])
    assert len(sharded.programs) == 2
    kinds = {
        False: with_change(lambda self, x, c: torch.nan_to_num(x * c, 1.0)),
        True: with_change(lambda self, x, c: torch.nan_to_num(x * c[0], 1.0)),
    }
    for nested, kind in kinds.items():
        model, sharded = pair(kind)
        for _ in range(3):
            number = float("nan")
            assert_same(model, sharded, [number] if nested else number)
        assert len(sharded.programs) == 1


def test_the_same_tensor_twice_is_another_call() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return self.fc(q) if q is k else self.fc(q) + self.fc(k) * 2

    class Blind(Attention):
        def forward(self, q: Tensor, k: Tensor | None = None) -> Tensor:
            return self.fc(q) + (self.fc(k) * 2 if k is not None else 0)

    for kind, programs in ((Attention, 2), (Blind, 1)):
        model, sharded = pair(kind)
        for _ in range(2):
            results = []
            for each in (model, sharded):
                q, k = X.clone().requires_grad_(), X.clone().requires_grad_()
                one, two = each(q, k), each(q, q)
                results.append((one, two, *torch.autograd.grad((one * two).sum(), (q, k))))
            assert all(map(torch.equal, *results))
        assert len(sharded.programs) == programs


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "number"),
    [
        ((4,), lambda t: float(t.numpy().sum())),
        ((4,), lambda t: float(np.asarray(t).sum())),
        ((4,), lambda t: t.tolist()[0]),
        ((), lambda t: t.item()),
        ((), float),
    ],
    ids=["numpy", "asarray", "tolist", "item", "float"],
)
def test_numbers_of_a_plain_tensor_are_its_own_and_are_read_again(shape: Any, number: Any) -> None:
    def init(self: Any) -> None:
        self.table = torch.full(shape, 2.0)

    model, sharded = pair(with_change(lambda self, x: x * number(self.table), init))
    assert_same(model, sharded)
    for each in (model, sharded):
        each.table.add_(1)
    assert_same(model, sharded)
    for each in (model, sharded):
        each.table = torch.full(shape, 7.0)
    assert_same(model, sharded)


def test_requires_grad_is_the_parameters_own_without_gradients_too() -> None:
    kind = with_change(lambda self, x: x * (2 if self.fc.weight.requires_grad else 3))
    model, sharded = pair(kind)
    with torch.no_grad():
        assert_same(model, sharded)
    assert_same(model, sharded)
    for each in (model, sharded):
        each.fc.weight.requires_grad_(False)
    with torch.no_grad():
        assert_same(model, sharded)
    assert_same(model, sharded)


def test_requires_grad_of_an_input_is_its_own_without_gradients_too() -> None:
    class Net(Base):
        def forward(self, x: Tensor, *rest: Any) -> Tensor:
            return self.fc(x) * (2 if x.requires_grad else 3)

    model, sharded = pair(Net)
    for x in (X, X.clone().requires_grad_()):
        with torch.no_grad():
            assert torch.equal(sharded(x), model(x))
        assert torch.equal(sharded(x), model(x))


def test_reading_grad_is_refused() -> None:
    kind = with_change(lambda self, x: x if self.fc.weight.grad is None else x * 4)
    _, sharded = pair(kind)
    with pytest.raises(CaptureError, match=r"reads \.grad of parameter 'fc\.weight'"):
        sharded(X)


def test_a_conversion_that_changes_nothing_and_grad_of_a_buffer_are_as_in_eager() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        self.fc = self.fc.to(x.dtype)
        return x * self.scale if self.scale.grad is None else x

    kind = with_change(change, lambda self: self.register_buffer("scale", torch.tensor(3.0)))
    assert_same(*pair(kind))


def test_a_conversion_that_changes_parameters_is_refused() -> None:
    _, sharded = pair(with_change(lambda self, x: x + 0 * self.fc.to(torch.float64).bias.float()))
    with pytest.raises(CaptureError, match=r"'fc\.(weight|bias)'"):
        sharded(X)


def _catches_float(self: Any, x: Tensor) -> Tensor:
    try:
        factor = float(x.detach().sum())
    except Exception:
        factor = 5.0
    return x * factor


def _catches_branch(self: Any, x: Tensor) -> Tensor:
    try:
        factor = 2.0 if x.detach().sum().item() > 0 else 3.0
    except Exception:
        factor = 5.0
    return x * factor


def test_a_question_in_a_try_has_its_answers() -> None:
    model, sharded = pair(with_change(_catches_branch))
    for sign in (1, -1, 1):
        assert torch.equal(model(X * sign), sharded(X * sign))


def test_an_error_of_capture_that_the_model_catches_is_raised() -> None:
    _, sharded = pair(with_change(_catches_float))
    with pytest.raises(CaptureError, match="test_state_read_by_forward"):
        sharded(X)


# -- memory shared by parameters ------------------------------------------------------------------


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    class Tied(Base):
        def init(self) -> None:
            self.other = nn.Linear(4, 4)
            self.other.weight = nn.Parameter(self.fc.weight.data)

    with pytest.raises(PlanError, match=r"'fc\.weight' and 'other\.weight' share memory"):
        graphshard.compile(Tied(), LINEAR)

    class Viewing(Base):
        def init(self) -> None:
            self.register_buffer("view", self.fc.weight.data[1:])

    with pytest.raises(PlanError, match=r"'fc\.weight' and 'view' share memory"):
        graphshard.compile(Viewing(), LINEAR)

    class Neighbours(Base):
        def init(self) -> None:
            flat = torch.randn(8)
            self.one, self.two = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])

        def change(self, x: Tensor) -> Tensor:
            return x * self.one + self.two

    assert_same(*pair(Neighbours))
