"""Python state of the model seen through the sharded module: it takes effect or is refused."""

from __future__ import annotations

import argparse
import copy
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError, RuntimeStateError

LINEAR = graphshard.BlockPolicy({nn.Linear})
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Schedule:
    """An object of the user's that a model may hold."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.steps = 0


class Net(nn.Module):
    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.alpha = 1.0
        self.scales = [1.0, {"last": 1.0}]
        self.schedule = Schedule()
        self.args = argparse.Namespace(gain=1.0)
        self.space = types.SimpleNamespace(gain=1.0)
        self.table = torch.ones(4)
        self.act = torch.tanh

    @property
    def twice(self) -> float:
        return self.alpha * 2

    @twice.setter
    def twice(self, value: float) -> None:
        self.alpha = value / 2

    def set_alpha(self, value: float) -> float:
        self._set(value)
        return self.alpha

    def _set(self, value: float) -> None:
        self.alpha = value

    def set_scale(self, value: Tensor) -> None:
        self.scale = value

    def freeze(self) -> int:
        for param in self.fc.parameters():
            param.requires_grad = False
        return sum(param.numel() for param in self.fc.parameters())

    def count_of(self, x: Tensor) -> int:
        return x.numel()

    def weight_of_last(self) -> Tensor:
        return self.fc.weight

    def layer_of_table(self) -> Tensor:
        return self.fc(self.table)

    def set_and_compute(self, value: float) -> Tensor:
        self.alpha = value
        return self.fc.bias * value

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.drop(self.bn(self.fc(x)))) * self.alpha * self.beta * self.table
        x = x * self.scales[0] * self.scales[1]["last"] * self.schedule.scale
        x = x * self.args.gain * self.space.gain
        return x * getattr(self, "gamma", 1.0)


def pair(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, Any]:
    """A model and its sharded copy, with equal weights."""
    torch.manual_seed(0)
    model = make()
    return model, graphshard.compile(copy.deepcopy(model), LINEAR)


def assert_same_step(model: nn.Module, sharded: Any) -> None:
    results = []
    for each in (model, sharded):
        torch.manual_seed(1)
        each.zero_grad()
        out = each(X)
        out.sum().backward()
        grads = [None if p.grad is None else p.grad.clone() for p in each.parameters()]
        results.append((out.detach(), grads, [b.clone() for b in each.buffers()]))
    (ours, our_grads, our_buffers), (theirs, their_grads, their_buffers) = results
    assert torch.equal(ours, theirs)
    for mine, other in zip(our_grads + our_buffers, their_grads + their_buffers, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


def set_path(module: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    setattr(module, name, value)


CHANGES = {
    "an attribute": ("alpha", 5.0),
    "an attribute of the class": ("beta", 5.0),
    "an attribute that was not there": ("gamma", 5.0),
    "a property": ("twice", 5.0),
    "a function": ("act", torch.relu),
    "a list": ("scales", [2.0, {"last": 3.0}]),
    "a plain tensor": ("table", torch.full((4,), 2.0)),
    "an attribute of a part": ("drop.p", 0.0),
    "momentum": ("bn.momentum", 0.01),
    "an attribute of an object": ("schedule.scale", 3.0),
    "an attribute of a namespace": ("args.gain", 3.0),
    "an attribute of another namespace": ("space.gain", 3.0),
}


@pytest.mark.filterwarnings("ignore:more than 8 programs were captured")
def test_what_is_set_takes_effect() -> None:
    """One after the other on one module, each in a further program."""
    model, sharded = pair()
    assert_same_step(model, sharded)
    for number, (what, (path, value)) in enumerate(CHANGES.items(), start=2):
        for each in (model, sharded):
            set_path(each, path, value)
        assert_same_step(model, sharded)
        assert len(sharded.programs) == number, what
    assert (sharded.drop.p, sharded.bn.momentum) == (0.0, 0.01)


def test_setting_it_back_finds_the_earlier_program() -> None:
    model, sharded = pair()
    for alpha in (1.0, 2.0, 1.0, 2.0, 1.0):
        for each in (model, sharded):
            each.alpha = alpha
            each.schedule.scale = alpha
        assert_same_step(model, sharded)
    assert len(sharded.programs) == 2
    for each in (model, sharded):
        each.scales[1]["last"] = 7.0
    assert_same_step(model, sharded)
    for each in (model, sharded):
        each.scales[1]["last"] = 1.0
    assert_same_step(model, sharded)
    assert len(sharded.programs) == 3


def test_deleting_takes_effect() -> None:
    model, sharded = pair()
    for each in (model, sharded):
        each.gamma = 2.0
    assert_same_step(model, sharded)
    for each in (model, sharded):
        del each.gamma
    assert_same_step(model, sharded)
    with pytest.raises(AttributeError, match="gamma"):
        del sharded.gamma
    with pytest.raises(AttributeError, match="gamma"):
        _ = sharded.gamma


def test_counters_that_forward_does_not_read_cause_no_capture() -> None:
    model, sharded = pair()
    for step in range(4):
        for each in (model, sharded):
            each.global_step = step
            each.schedule.steps = step
            each.drop.epoch = step
            each.args.step = step
        assert_same_step(model, sharded)
    assert (sharded.global_step, sharded.drop.epoch) == (3, 3)
    assert len(sharded.programs) == 1


def test_a_further_program_is_logged_with_the_attribute(caplog: pytest.LogCaptureFixture) -> None:
    _, sharded = pair()
    sharded(X)
    sharded.drop.p = 0.25
    sharded(X)
    assert "drop.p: 0.5 -> 0.25" in caplog.text


@pytest.mark.parametrize("name", ["fc", "drop", "new"])
def test_modules_are_not_replaced(name: str) -> None:
    _, sharded = pair()
    with pytest.raises(RuntimeStateError, match=rf"'{name}' cannot be added, replaced"):
        setattr(sharded, name, nn.Identity())
    with pytest.raises(RuntimeStateError, match=rf"'fc\.{name}' cannot be added"):
        setattr(sharded.fc, name, nn.Identity())
    with pytest.raises(RuntimeStateError, match=rf"'{name}' cannot be added"):
        sharded.add_module(name, nn.Identity())


def test_modules_are_not_removed_nor_forwards_replaced() -> None:
    _, sharded = pair()
    with pytest.raises(RuntimeStateError, match="'fc' cannot be added, replaced or removed"):
        del sharded.fc
    with pytest.raises(RuntimeStateError, match="'fc' cannot be added, replaced or removed"):
        sharded.fc = None
    with pytest.raises(RuntimeStateError, match="the forward of 'fc' is captured with the model's"):
        sharded.fc.forward = lambda x: x


def test_an_attribute_with_a_name_of_graphshards_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.plan = 3
    sharded = graphshard.compile(model, LINEAR)
    with pytest.raises((RuntimeStateError, AttributeError), match="plan"):
        sharded.plan = 4


# -- the model's class and methods -----------------------------------------------------------------


def test_a_sharded_module_is_an_instance_of_the_models_class() -> None:
    model, sharded = pair()
    assert isinstance(sharded, Net)
    assert isinstance(sharded, graphshard.ShardedModule)
    assert sharded.__class__ is Net
    assert type(sharded) is graphshard.ShardedModule
    assert inspect.signature(sharded.forward) == inspect.signature(model.forward)
    assert [*inspect.signature(sharded.__class__.forward).parameters] == ["self", "x"]


def test_a_forward_put_in_place_of_the_modules_own_is_called() -> None:
    _, sharded = pair()
    sharded.eval()
    x = torch.ones(2, 4)
    own = sharded.forward
    sharded.forward = lambda x: own(x) * 2
    assert torch.equal(sharded(x), own(x) * 2)


def test_methods_are_called_as_the_models_are() -> None:
    model, sharded = pair()
    assert inspect.signature(sharded.set_alpha) == inspect.signature(model.set_alpha)
    assert sharded.set_alpha(3.0) == model.set_alpha(3.0) == 3.0
    assert_same_step(model, sharded)
    assert torch.equal(sharded.weight_of_last(), model.fc.weight)
    assert sharded.count_of(torch.ones(2, 3)) == 6
    with pytest.raises(CaptureError, match=r"changes parameter 'fc\.weight' in place"):
        sharded.fc.reset_parameters()
    assert torch.equal(sharded.fc.weight, model.fc.weight)
    assert sharded.call_method("set_alpha", 2.0) == model.set_alpha(2.0) == 2.0
    assert sharded.call_method("freeze") == model.freeze() == 20
    assert [p.requires_grad for p in sharded.fc.parameters()] == [False, False]
    assert_same_step(model, sharded)
    method = sharded.set_alpha
    del sharded
    with pytest.raises(RuntimeStateError, match="set_alpha is a method of a sharded module that"):
        method(1.0)


def test_a_method_that_computes_sets_plain_values() -> None:
    model, sharded = pair()
    out = sharded.call_method("set_and_compute", 3.0)
    assert torch.equal(out, model.fc.bias * 3.0)
    assert sharded.alpha == 3.0
    assert torch.equal(sharded.call_method("weight_of_last"), model.fc.weight)
    assert torch.equal(sharded.call_method("layer_of_table"), model.layer_of_table())
    for each in (model, sharded):
        each.set_scale(torch.tensor(2.0))
    assert torch.equal(sharded.scale, model.scale)


# -- train and eval --------------------------------------------------------------------------------


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


class WithFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = FrozenNorm(4)
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.bn.eval()
        self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.frozen(x)) * (3 if self.merged else 1)


def test_overridden_train_is_honoured() -> None:
    model, sharded = pair(WithFrozen)
    for mode in (True, False, True):
        assert model.train(mode) is model
        assert sharded.train(mode) is sharded
        flags = [[part.training for part in each.modules()] for each in (model, sharded)]
        assert flags[0] == flags[1]
        assert sharded.merged is model.merged
        assert_same_step(model, sharded)
    model.eval()
    assert sharded.eval() is sharded
    assert_same_step(model, sharded)
    for each in (model, sharded):
        each.train()
        each.frozen.train()
        each.bn.train()
    assert_same_step(model, sharded)


def test_train_replaced_on_an_instance_is_honoured() -> None:
    def disabled(mode: bool = True) -> None:
        pass

    class Disabled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bn.eval()
            self.bn.train = disabled

    model, sharded = pair(Disabled)
    for each in (model, sharded):
        each.train()
        assert not each.bn.training
    assert_same_step(model, sharded)


def test_other_overrides_are_named_at_compile() -> None:
    class Few(Net):
        def parameters(self, recurse: bool = True) -> Any:
            return self.fc.parameters(recurse)

    with pytest.warns(UserWarning, match=r"does not call Few\.parameters, but nn\.Module's"):
        graphshard.compile(Few(), LINEAR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphshard.compile(Net(), LINEAR)


# -- objects shared with the model that was compiled -----------------------------------------------


def test_plain_objects_are_shared_with_the_model_and_its_attributes_are_not() -> None:
    schedule = Schedule()

    def make() -> nn.Module:
        net = Net()
        net.schedule = schedule
        return net

    torch.manual_seed(0)
    model = make()
    sharded = graphshard.compile(model, LINEAR)
    assert sharded.schedule is schedule
    assert_same_step(model, sharded)
    schedule.scale = 4.0
    assert_same_step(model, sharded)
    model.scales[0] = 2.0
    assert_same_step(model, sharded)
    model.alpha = 9.0
    assert sharded.alpha == 1.0


# -- on ranks ------------------------------------------------------------------------------------


class Merging(nn.Module):
    """Merges a product of parameters into a weight for eval, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode == self.merged:
            self.fc.weight.data += (-1 if mode else 1) * (self.extra.weight @ self.extra.weight)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.fc(x))


def merged_on_the_shards(rank: int) -> None:
    model, sharded = pair(Merging)
    for mode in (False, True, False):
        for each in (model, sharded):
            each.train(mode)
        assert sharded.merged is model.merged
        assert torch.equal(sharded.fc.weight.full_tensor(), model.fc.weight)
        with torch.no_grad():
            assert torch.equal(sharded(X), model(X))


test_on_two_ranks = on_ranks([merged_on_the_shards], 2)
