"""Plain values that a forward assigns to Python state: each call assigns them, too."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from stateful_models import LINEAR, Counter, X, assert_same, count_in_namespace, pair, with_change
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError

CALLS = 0


class Options:
    calls = 0


def _rebind_global(self: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def _count_in_class(self: Any, x: Tensor) -> Tensor:
    Options.calls += 1
    return x * Options.calls


def _counts(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return x * self.steps


def _begins(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "begun"):
        self.begun = True
        return x * 0.5
    return x


def _alternates(self: Any, x: Tensor) -> Tensor:
    self.flipped = not self.flipped
    return -x if self.flipped else x


def _warms_up(self: Any, x: Tensor) -> Tensor:
    self.gain = min(1.0, self.gain + 0.25)
    return x * self.gain


@pytest.mark.parametrize(
    ("change", "programs"),
    [
        (_counts, 5),
        (_begins, 2),
        (_alternates, 2),
        (_warms_up, 4),
        (count_in_namespace, 5),
        (_rebind_global, 5),
        (_count_in_class, 5),
    ],
)
def test_plain_values_that_forward_assigns_are_assigned(change: Any, programs: int) -> None:
    def init(self: Any) -> None:
        self.steps, self.gain, self.flipped, self.state = 0, 0.0, False, Counter()

    model, sharded = pair(with_change(change, init))
    for _ in range(5):
        before, called = Options.calls, CALLS
        expected = model(X)
        Options.calls, globals()["CALLS"] = before, called  # what both count in
        assert torch.equal(sharded(X), expected)
        for name in ("steps", "gain", "flipped", "begun"):
            assert getattr(model, name, None) == getattr(sharded, name, None)
        assert model.state.steps == sharded.state.steps
    assert len(sharded.programs) == programs
    Options.calls = globals()["CALLS"] = 0


def test_a_value_that_forward_only_writes_costs_no_capture() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        self.rows = x.shape[0]
        return x * 2

    _, sharded = pair(with_change(change))
    for rows in (2, 3, 2):
        sharded(X[:rows])
        assert sharded.rows == rows
    assert len(sharded.programs) == 2


def test_a_counter_that_nothing_computes_with_is_said_and_undone() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        self.steps += 1
        return x * 2

    def init(self: Any) -> None:
        self.steps = 0

    for dynamic in (None, {"args[0]": {0: "rows"}}):
        _, sharded = pair(with_change(change, init))
        with pytest.warns(UserWarning, match=r"assigns steps \(at .*self\.steps \+= 1"):
            sharded = graphshard.compile(
                with_change(change, init)(), LINEAR, example_inputs=(X,), dynamic=dynamic
            )
        for _ in range(3):
            sharded(X)
        assert sharded.steps == 0
        assert len(sharded.programs) == 1
        assert any("steps" in note for note in sharded.program.notes)


def _hook(self: Any) -> None:
    self.act.register_forward_hook(lambda act, args, out: out * 2)


def _replace_the_module(self: Any) -> None:
    """As BigBird replaces its attention where a sequence is short."""
    self.act = nn.Sigmoid()


@pytest.mark.parametrize(
    ("begin", "named"), [(_hook, r"act\._forward_hooks"), (_replace_the_module, "act")]
)
def test_flags_of_what_is_not_repeated_are_not_assigned(begin: Any, named: str) -> None:
    """It would be missing in the second program, where the flag says that it is there."""

    def change(self: Any, x: Tensor) -> Tensor:
        if not self.begun:
            begin(self)
            self.begun = True
        return self.act(x)

    def init(self: Any) -> None:
        self.act, self.begun = nn.Tanh(), False

    model, sharded = pair(with_change(change, init))
    with pytest.warns(UserWarning, match=rf"assigns {named}, begun"):
        assert_same(model, sharded)
    assert_same(model, sharded)
    assert sharded.begun is False


def test_there_is_a_bound_of_programs_for_values_that_forward_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(self: Any) -> None:
        self.steps = 0

    monkeypatch.setattr("graphshard.capture.captured.MOST_ANSWERS", 3)
    model, sharded = pair(with_change(_counts, init))
    for _ in range(3):
        assert_same(model, sharded)
    with pytest.raises(CaptureError, match=r"forward changes \(steps: 2 -> 3\).*a buffer"):
        sharded(X)

    def scales(self: Any, x: Tensor) -> Tensor:
        self.rows = x.shape[0]
        return x * self.steps

    model, sharded = pair(with_change(scales, init))
    for steps in range(5):
        model.steps = sharded.steps = steps  # by the user, and as often as they like
        assert_same(model, sharded)


class Config:
    def __init__(self) -> None:
        self.kind: Any = None


def _settle(self: Any, x: Tensor) -> Tensor:
    """As transformers' classifiers settle the kind of their problem."""
    if self.config.kind is None:
        self.config.kind = "double" if x.dtype == torch.float32 else "triple"
    return x * {"double": 2.0, "triple": 3.0, "fourfold": 4.0}[self.config.kind]


def _settle_a_number(self: Any, x: Tensor) -> Tensor:
    """Another program before than after, by the value of a constant alone."""
    if self.config.kind is None:
        self.config.kind = 2
        return x * torch.tensor(1.0)
    return x * torch.tensor(float(self.config.kind))


def _settle_and_count(self: Any, x: Tensor) -> Tensor:
    self.config.kind = 1 if self.config.kind is None else self.config.kind + 1
    return x * self.config.kind


def _with_config(change: Any) -> tuple[Any, Any]:
    def init(self: Any) -> None:
        self.config = Config()

    return pair(with_change(change, init))


def test_a_setting_that_forward_settles_is_settled_without_a_warning() -> None:
    model, sharded = _with_config(_settle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert_same(model, sharded)
        assert sharded.config.kind == "double"
        assert len(sharded.programs) == 1
        for kind, programs in (("fourfold", 2), (None, 2), ("triple", 3), ("double", 3)):
            model.config.kind = sharded.config.kind = kind
            for _ in range(2):
                assert_same(model, sharded)
            assert sharded.config.kind == model.config.kind
            assert len(sharded.programs) == programs
    assert not any("assigned" in note for note in sharded.program.notes)


def test_a_setting_is_settled_by_a_call_and_not_by_a_capture() -> None:
    model, _ = _with_config(_settle)
    sharded = graphshard.compile(copy.deepcopy(model), LINEAR, example_inputs=(X,))
    assert sharded.config.kind is None
    assert_same(model, sharded)
    assert len(sharded.programs) == 1


def test_a_call_that_settles_may_compute_otherwise_than_later_ones() -> None:
    model, sharded = _with_config(_settle_a_number)
    for programs in (1, 2, 2):
        assert_same(model, sharded)
        assert len(sharded.programs) == programs
        assert sharded.config.kind == 2


def _settle_by_a_table(self: Any, x: Tensor) -> Tensor:
    """One program before and after, but only later calls read the table."""
    if self.config.kind is None:
        self.config.kind = "double"
        return x * 2.0
    return x * self.config.factors[self.config.kind]


def test_what_only_later_calls_read_is_seen_when_it_changes() -> None:
    model, sharded = _with_config(_settle_by_a_table)
    for config in (model.config, sharded.config):
        config.factors = {"double": 2.0}
    for _ in range(2):
        assert_same(model, sharded)
    assert len(sharded.programs) == 1
    for config in (model.config, sharded.config):
        config.factors = {"double": 5.0}
    assert_same(model, sharded)
    assert len(sharded.programs) == 2


def test_a_counter_that_begins_at_none_counts() -> None:
    model, sharded = _with_config(_settle_and_count)
    for _ in range(3):
        assert_same(model, sharded)
        assert sharded.config.kind == model.config.kind
