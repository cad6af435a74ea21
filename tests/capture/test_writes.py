"""A step that writes nowhere is traced as it is; any other by functionalization, to be the same."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_models import assert_same_as_eager
from models import CASES
from torch import Tensor, nn

from graphshard.capture import one_trace, traced_module
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError
from graphshard.program import ops

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each trace whether it was functionalized."""
    found: list[bool] = []
    trace = one_trace._trace

    def noted(*args: Any) -> Any:
        found.append(args[4])  # functional
        return trace(*args)

    monkeypatch.setattr(one_trace, "_trace", noted)
    return found


def _lines(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> list[str]:
    program = capture(model, (), kwargs, **options).program
    return [str(node.format_node()) for node in program.graph.nodes]


_WRITE = ("t5", "regnet")  # shifted labels, running statistics


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in ("gpt2", "bert", "t5") else [])
        for n in CASES
    ],
)
def test_graphs_are_the_same_either_way(
    name: str, ways: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = CASES[name].model(), CASES[name].inputs(0)
    plain = _lines(model, inputs)
    assert ways == ([False, True] if name in _WRITE else [False])
    if name not in _WRITE:
        _assert_same_with_functionalization(plain, monkeypatch, model, inputs)


def test_models_take_the_way_they_take_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a batch of one transformers looks for packed sequences, unless it is being compiled."""
    from transformers.utils import import_utils

    model = CASES["llama"].model()
    tokens = CASES["llama"].inputs(0)
    inputs: dict[str, Any] = {name: value[:1] for name, value in tokens.items()}
    inputs["use_cache"] = False
    asked = import_utils.is_fake_tensor
    plain = _lines(model, inputs)
    assert import_utils.is_fake_tensor is asked
    assert not any("cumsum" in line for line in plain)
    assert_same_as_eager(model, (), inputs)
    _assert_same_with_functionalization(plain, monkeypatch, model, inputs)


def test_graphs_are_the_same_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CASES["llama"].model().eval(), CASES["llama"].inputs(0)
    plain = _lines(model, inputs, grad=False)
    _assert_same_with_functionalization(plain, monkeypatch, model, inputs, grad=False)


def _assert_same_with_functionalization(
    plain: list[str], monkeypatch: pytest.MonkeyPatch, *example: Any, **options: Any
) -> None:
    trace = one_trace._trace
    monkeypatch.setattr(one_trace, "_trace", lambda *args: trace(*args[:4], True, *args[5:]))
    functional = _lines(*example, **options)
    assert plain == functional, "\n".join(difflib.unified_diff(functional, plain, n=0))


class Net(nn.Module):
    """A linear layer, and then what `forward` does."""

    def __init__(self, then: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self._then = then

    def forward(self, x: Tensor) -> Tensor:
        return self._then(self, self.linear(x)).sum()


def intermediate(net: Net, x: Tensor) -> Tensor:
    return (x * 2).relu_()


def part_of_an_intermediate(net: Net, x: Tensor) -> Tensor:
    y = x * 1
    y[:, 1] = x[:, 0]
    return y * y


def running_statistics(net: Net, x: Tensor) -> Tensor:
    return net.norm(x)


def buffer(net: Net, x: Tensor) -> Tensor:
    net.seen += x.detach().sum(0)
    return x * net.seen


def new_buffer(net: Net, x: Tensor) -> Tensor:
    net.seen = net.seen + x.detach().sum(0)
    return x * net.seen


def caught(net: Net, x: Tensor) -> Tensor:
    try:
        return (x * 2).add_(1)
    except Exception:
        return x * 100


class _WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * 2).mul_(3)


def in_backward(net: Net, x: Tensor) -> Tensor:
    return _WritesInBackward.apply(x)


WRITING = [
    intermediate,
    part_of_an_intermediate,
    running_statistics,
    buffer,
    new_buffer,
    caught,
    in_backward,
]


@pytest.mark.parametrize("then", WRITING, ids=lambda f: f.__name__)
def test_what_writes_is_functionalized(
    then: Callable[[Net, Tensor], Tensor], ways: list[bool]
) -> None:
    captured = assert_same_as_eager(Net(then), (X,))
    assert ways == [False, True]
    assert not any(map(ops.writes, captured.program.nodes()))


def constant(net: Net, x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0])


def views(net: Net, x: Tensor) -> Tensor:
    return x.t().reshape(-1)[3:].unsqueeze(0).expand(2, -1) * x.flatten()[3:]


def dropped(net: Net, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


@pytest.mark.parametrize("then", [constant, views, dropped], ids=lambda f: f.__name__)
def test_what_writes_nowhere_is_not(
    then: Callable[[Net, Tensor], Tensor], ways: list[bool]
) -> None:
    captured = assert_same_as_eager(Net(then), (X,))
    assert ways == [False]
    names = [str(node.target) for node in captured.program.nodes()]
    assert "aten.lift_fresh.default" not in names
    assert ("aten.lift_fresh_copy.default" in names) == (then is constant)


@torch.library.custom_op("graphshard_tests::at_least", mutates_args=())
def at_least(x: Tensor, *, least: float | None = 0.0) -> Tensor:
    """`x`, and where there is a least value, no less than it."""
    return x.clone() if least is None else x.clamp(least)


@at_least.register_fake
def _(x: Tensor, *, least: float | None = 0.0) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("grad", [True, False])
def test_a_none_that_is_no_default_is_still_said(grad: bool) -> None:
    def exact(net: Net, x: Tensor) -> Tensor:
        plain, cut = at_least(x.detach(), least=None), at_least(x.detach())
        return torch.div(x * plain + cut, x.abs() + 1, rounding_mode=None)

    assert_same_as_eager(Net(exact), (X,))
    said = [line for line in _lines(Net(exact), {"x": X}, grad=grad) if "None}" in line]
    assert [line.split()[0] for line in said] == ["%at_least", "%div"]


def test_a_forward_that_writes_is_not_left_halfway(ways: list[bool]) -> None:
    depth = 0

    def counts(net: Net, x: Tensor) -> Tensor:
        nonlocal depth
        depth += 1
        y = (x * depth).relu_()
        depth -= 1
        return y

    assert_same_as_eager(Net(counts), (X,))
    assert ways == [False, True]
    assert depth == 0


def test_an_error_of_the_model_is_told_with_its_line(ways: list[bool]) -> None:
    def fails(net: Net, x: Tensor) -> Tensor:
        raise ValueError("no luck here")

    with pytest.raises(CaptureError, match="ValueError while being captured: no luck here"):
        capture(Net(fails), (X,))
    assert ways == [False], "an error of the model's needs no second trace"


def test_a_value_that_is_known_but_for_a_write_is_asked_for_again(ways: list[bool]) -> None:
    def asks(net: Net, x: Tensor) -> Tensor:
        return x * 2 if torch.zeros(3).fill_(1).sum().item() == 3 else x * 5

    assert_same_as_eager(Net(asks), (X,))
    assert ways == [False, True]


@pytest.mark.parametrize("place", ["in the trace", "after the trace"])
def test_a_defect_of_ours_in_the_first_trace_surfaces(
    place: str, ways: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = {
        "in the trace": (traced_module, "_reachable"),
        "after the trace": (one_trace, "program_of_joint"),
    }[place]
    function = getattr(module, name)
    calls: list[Any] = []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise ZeroDivisionError("a defect")
        return function(*args, **kwargs)  # so would a second trace succeed

    monkeypatch.setattr(module, name, fail_once)
    with pytest.raises((CaptureError, ZeroDivisionError), match="a defect"):
        capture(Net(views), (X,))
    assert ways == [False]


def test_a_trace_that_was_cut_short_leaves_nothing_behind(ways: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))
    program = capture(model, (X,)).program
    assert ways == [False, True]
    assert {node.meta["fqn"] for node in program.nodes()} == {"0", "1.0", "1.1"}
    assert not torch.fx.traceback.current_meta
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
