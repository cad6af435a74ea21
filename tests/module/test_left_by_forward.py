"""Tensors that a forward leaves elsewhere than in its result: each call puts them there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import CaptureError, RuntimeStateError

LINEAR = graphshard.BlockPolicy({nn.Linear})

COLLECTED: dict[str, Any] = {}


class Net(nn.Module):
    """`leave(self, y)` is called on an activation; `init(self)` prepares."""

    def __init__(self, leave: Any, init: Any = None) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.leave = leave
        if init is not None:
            init(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        self.leave(self, y)
        return self.out(y)


def pair(leave: Any, init: Any = None, **options: Any) -> tuple[Any, Any]:
    """The plain model and a sharded one, of equal weights and with containers of their own."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(leave, init))
    return models[0], graphshard.compile(models[1], options.pop("policy", LINEAR), **options)


def batch(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def tensors_in(value: Any) -> list[Tensor]:
    value = vars(value) if isinstance(value, SimpleNamespace) else value
    value = list(value) if isinstance(value, deque) else value
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def assert_same_steps(model: Any, sharded: Any, read: Any, steps: int = 4) -> None:
    """Train both on loss and left values; the values, their gradients and structure are equal."""
    for step in range(steps):
        left = []
        for each in (model, sharded):
            each.zero_grad()
            result = each(batch(step))
            value = read(each)
            found = tensors_in(value)
            assert found
            left.append((value, [t.detach().clone() for t in found]))
            loss = result.square().mean() + sum(t.square().sum() for t in found if t.requires_grad)
            loss.backward()
        assert pytree.tree_structure(left[0][0]) == pytree.tree_structure(left[1][0])
        for mine, theirs in zip(left[1][1], left[0][1], strict=True):
            assert torch.equal(mine, theirs)
        grads = {name: p.grad for name, p in model.named_parameters()}
        for name, param in sharded.named_parameters():
            assert torch.equal(param.grad, grads[name]), name


def attribute(self: Any, y: Tensor) -> None:
    self.aux = y.square().mean()


def several(self: Any, y: Tensor) -> None:
    self.aux = {"y": y, "halves": [y[:, :3], y[:, 3:].detach()], "n": 2}


def appended(self: Any, y: Tensor) -> None:
    self.kept.clear()
    self.kept.append(y.mean())


def nested(self: Any, y: Tensor) -> None:
    self.kept["inner"].clear()
    self.kept["inner"].append(y.mean(0))
    self.kept["y"] = y


def of_object(self: Any, y: Tensor) -> None:
    self.box.last = y.std()


def of_part(self: Any, y: Tensor) -> None:
    self.fc.seen = y.mean()


def in_global(self: Any, y: Tensor) -> None:
    COLLECTED["y"] = y.mean(0)


def under_checkpoint(self: Any, y: Tensor) -> None:
    def inner(z: Tensor) -> Tensor:
        self.aux = self.out(z).square().mean()
        return z

    checkpoint(inner, y, use_reentrant=False)


def makes_list(self: Any) -> None:
    self.kept = []


def makes_deque(self: Any) -> None:
    self.kept = deque(maxlen=2)


def makes_dict(self: Any) -> None:
    self.kept = {"inner": []}


def makes_object(self: Any) -> None:
    self.box = SimpleNamespace(last=None)


DOORS = {
    "attribute": (attribute, None, lambda m: m.aux),
    "several": (several, None, lambda m: m.aux),
    "list": (appended, makes_list, lambda m: m.kept),
    "deque": (appended, makes_deque, lambda m: m.kept),
    "dict": (nested, makes_dict, lambda m: m.kept),
    "object": (of_object, makes_object, lambda m: m.box),
    "part": (of_part, None, lambda m: m.fc.seen),
    "global": (in_global, None, lambda m: COLLECTED),
    "checkpoint": (under_checkpoint, None, lambda m: m.aux),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_forward_leaves_is_there_after_each_call_with_its_gradient(door: str) -> None:
    leave, init, read = DOORS[door]
    COLLECTED.clear()
    model, sharded = pair(leave, init)
    assert_same_steps(model, sharded, read)
    assert len(sharded.programs) <= 2  # a container is empty in the first call


def test_containers_stay_the_users_own() -> None:
    _, sharded = pair(nested, makes_dict)
    kept, inner = sharded.kept, sharded.kept["inner"]
    sharded(batch(0))
    assert sharded.kept is kept
    assert kept["inner"] is inner
    assert len(inner) == 1


class Extractor:
    """Collects by a bound method, as code for distillation does."""

    def __init__(self) -> None:
        self.features: dict[str, Tensor] = {}

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.features["fc"] = out


@pytest.mark.filterwarnings("ignore:hooks on modules are captured")
@pytest.mark.parametrize("kind", ["closure", "method"])
def test_hooks_collect_beside_another_model(kind: str) -> None:
    models = []
    features: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        net = Net(lambda self, y: None)
        if kind == "method":
            extractor = Extractor()
            net.fc.register_forward_hook(extractor.hook)
            features.append(extractor.features)
        else:
            seen: dict[str, Tensor] = {}
            net.fc.register_forward_hook(lambda m, a, out, seen=seen: seen.update(fc=out))
            features.append(seen)
        models.append(net)
    model, sharded = models[0], graphshard.compile(models[1], LINEAR)
    own = {id(model): features[0], id(sharded): features[1]}

    def read(each: Any) -> Any:
        features[1]["teacher"] = torch.randn(3)  # another one in each call
        return own[id(each)]["fc"]

    assert_same_steps(model, sharded, read, steps=5)
    assert len(sharded.programs) <= 3


class Features(nn.Module):
    """Hooks that close over the model, or are methods of an object that holds it."""

    def __init__(self, collector: Any = None) -> None:
        super().__init__()
        self.net = Net(lambda self, y: None)
        self.features: dict[str, Tensor] = {"fc": torch.empty(0)}
        if collector is None:
            self.net.fc.register_forward_hook(self.keeping("fc"))
        else:
            collector.model = self
            self.net.fc.register_forward_hook(collector.hook)

    def keeping(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.features[name] = out

        return hook

    def forward(self, x: Tensor) -> Any:
        return self.net(x), self.features


@pytest.mark.filterwarnings("ignore:hooks on modules are captured")
def test_hooks_that_close_over_the_model_collect_on_the_sharded_one() -> None:
    torch.manual_seed(0)
    model = Features()
    torch.manual_seed(0)
    sharded = graphshard.compile(Features(), LINEAR)
    for step in range(3):
        (_, mine), (_, theirs) = sharded(batch(step)), model(batch(step))
        assert torch.equal(mine["fc"], theirs["fc"])
        assert torch.equal(sharded.features["fc"], theirs["fc"])
    collector = Extractor()
    sharded = graphshard.compile(Features(collector), LINEAR)
    sharded(batch(0))
    assert collector.features["fc"].requires_grad


def test_what_forward_adds_to_its_arguments() -> None:
    class Adds(Net):
        def forward(self, x: Tensor, out: Any, named: Any) -> Tensor:
            y = super().forward(x)
            out.append(y.mean())
            named["inner"].append({"y": y, "n": 1})
            named["y"] = self.fc.weight.norm()
            return y

    torch.manual_seed(0)
    model = Adds(lambda self, y: None)
    sharded = graphshard.compile(copy.deepcopy(model), LINEAR)
    for step in range(2):
        found = []
        for each in (model, sharded):
            each.zero_grad()
            out: list[Any] = []
            named: dict[str, Any] = {"inner": ["text"], "n": 2}
            each(batch(step), out, named=named)
            found.append((out, named))
            sum(t.square().sum() for t in tensors_in(found[-1])).backward()
        assert pytree.tree_structure(found[0]) == pytree.tree_structure(found[1])
        for mine, theirs in zip(*map(tensors_in, found[::-1]), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(sharded.fc.weight.grad, model.fc.weight.grad)
    assert len(sharded.programs) == 1


# -- buffers --------------------------------------------------------------------------------------


def assigned(self: Any, y: Tensor) -> None:
    self.pool = y.mean(0)


def written(self: Any, y: Tensor) -> None:
    self.pool = self.pool.detach() * 0
    self.pool += y.mean(0)


def makes_buffer(self: Any) -> None:
    self.register_buffer("pool", torch.zeros(6))


def test_a_buffer_that_forward_replaces_carries_its_gradient() -> None:
    model, sharded = pair(assigned, makes_buffer)
    assert_same_steps(model, sharded, lambda m: m.pool)
    assert torch.equal(sharded.full_state_dict()["pool"], model.pool)
    assert not sharded.state_dict()["pool"].requires_grad
    for each in (model, sharded):
        with torch.no_grad():
            each(batch(9))
    assert torch.equal(sharded.pool, model.pool)
    assert not sharded.pool.requires_grad


def test_a_buffer_replaced_in_inference_mode_can_be_replaced_outside_of_it() -> None:
    model, sharded = pair(assigned, makes_buffer)
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad):
        for each in (model, sharded):
            with mode():
                each(batch(0))
        assert torch.equal(sharded.pool, model.pool)
    with torch.inference_mode():  # by the user
        sharded.pool = torch.zeros(6)
    with torch.no_grad():
        sharded(batch(0))
    assert torch.equal(sharded.pool, model.pool)


def test_a_buffer_that_backward_reads_is_assigned_anew() -> None:
    class Normed(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x) / self.pool
            self.pool = self.pool * 0.9 + y.detach().abs().mean(0)
            return self.out(y)

    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Normed(lambda self, y: None, lambda self: makes_buffer(self)))
        models[-1].pool += 1
    model, sharded = models[0], graphshard.compile(models[1], LINEAR)
    assert_same_steps(model, sharded, lambda m: m.pool)
    assert len(sharded.programs) == 1


def test_a_buffer_takes_the_dtype_of_what_replaces_it() -> None:
    def leave(self: Any, y: Tensor) -> None:
        self.pool = y.double().mean(0)

    model, sharded = pair(leave, makes_buffer)
    assert_same_steps(model, sharded, lambda m: m.pool)
    assert sharded.pool.dtype == model.pool.dtype == torch.float64


def test_a_buffer_that_forward_reads_must_not_carry_a_gradient() -> None:
    model, sharded = pair(written, makes_buffer)
    for each in (model, sharded):
        (each(batch(0)).sum() + each.pool.sum()).backward()
    assert torch.equal(sharded.fc.weight.grad, model.fc.weight.grad)
    with pytest.raises(RuntimeStateError, match=r"reads buffer 'pool', which .* a gradient"):
        sharded(batch(1))
    sharded.pool = sharded.pool.detach()
    sharded(batch(1))


# -- state that goes from call to call ------------------------------------------------------------


def carries(self: Any, y: Tensor) -> None:
    self.state = y.detach() if self.state is None else self.state * 0.5 + y.detach()


def caches(self: Any, y: Tensor) -> None:
    if self.state is None:
        self.state = torch.arange(6.0)
    self.scaled = y * self.state


def makes_none(self: Any) -> None:
    self.state = None


def test_a_tensor_that_is_carried_from_call_to_call_is_refused() -> None:
    _, sharded = pair(carries, makes_none)
    sharded(batch(0))
    with pytest.raises(CaptureError, match=r"left in state \(at .*self\.state = y.*as a buffer"):
        sharded(batch(1))


def test_a_cache_that_forward_fills_once_serves_later_calls() -> None:
    model, sharded = pair(caches, makes_none)
    for step in range(4):
        assert torch.equal(sharded(batch(step)), model(batch(step)))
        assert torch.equal(sharded.state, model.state)
    assert len(sharded.programs) == 2


def test_what_a_call_left_goes_with_the_next_call() -> None:
    _, sharded = pair(several)
    sharded(batch(0))
    first = weakref.ref(sharded.aux["y"])
    for step in range(2):
        sharded(batch(step)).sum().backward()
    gc.collect()
    assert first() is None


class Locked:
    """No pickle takes it apart."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.thread = tensor, (each for each in ())


def test_what_cannot_be_taken_apart_is_refused_at_its_line() -> None:
    def leave(self: Any, y: Tensor) -> None:
        self.aux = Locked(y)

    _, sharded = pair(leave)
    with pytest.raises(CaptureError, match=r"leaves tensors in aux \(at .*self\.aux = Locked"):
        sharded(batch(0))
