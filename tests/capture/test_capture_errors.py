"""What cannot be one graph is refused with the user's own line and a remedy."""

from __future__ import annotations

import re

import pytest
import torch
from capture_models import Net, X, linear
from torch import nn

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError


def refused(model, *args, **kwargs) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, args, kwargs)
    return str(caught.value)


def branch_on_values(m, x):
    if float(m.fc(x).sum()) > 0:  # the line at fault
        return x.cos()
    return -x


def warn_of_padding(m, x):
    if not torch.compiler.is_compiling() and (x == 0).any():
        m.warned = True
    return m.fc(x)


def test_a_way_for_compilers_is_taken_where_the_other_looks_at_values():
    model = Net(warn_of_padding, fc=linear())
    program = capture(model, (X,)).program
    assert [note for note in program.notes if "torch.compiler.is_compiling() true" in note]
    assert not torch.compiler.is_compiling()
    assert not capture(linear(), (X,)).program.notes


def test_a_number_that_is_needed_names_the_line_that_it_is_read_at():
    def forward(m, x):
        y = m.fc(x)
        rows = (y[:, 0] > 0).nonzero()[:, 0]
        return y[: int(rows.numel())].sum() * len(rows)

    message = refused(Net(forward, fc=linear()), X)
    assert re.search(r"it needs the number u\d+", message)
    assert re.search(r"u\d+ is read at .*: rows = \(y\[:, 0\] > 0\)", message)


@torch.library.custom_op("graphshard_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def after_a_way_for_compilers(m, x):
    return branch_on_values(m, warn_of_padding(m, x))


def without_a_way_for_compilers(m, x):
    if torch.compiler.is_compiling():
        raise RuntimeError("no compilers here")
    return branch_on_values(m, x)


def counts(m, x):
    for _ in range((m.fc(x) > 0).sum().item()):  # the line at fault
        x = m.fc(x)
    return x


def loops_over_values(m, x):
    for row in (m.fc(x)[:, 0] > 0).nonzero()[:, 0].tolist():
        x = x + m.fc(x)[row]
    return x


def changes_a_parameter(m, x):
    with torch.no_grad():
        m.fc.weight.mul_(0.9)
    return m.fc(x)


def gives_a_buffer_a_gradient(m, x):
    h = m.fc(x)
    m.mean.add_(h.mean(0))
    return h - m.mean


def gives_a_buffer_another_shape(m, x):
    m.mean = x
    return m.fc(x)


def saves_on_the_host(m, x):
    with torch.autograd.graph.save_on_cpu():
        return m.fc(x)


class Holder:
    def __init__(self, x):
        self.x = x

    def __reduce__(self):
        raise TypeError("no")


HERE = r"test_capture_errors\.py:\d+ in"
META = torch.empty(4, device="meta")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (
            branch_on_values,
            rf"control flow depends on the values.*{HERE} branch_on_values: if float",
        ),
        (branch_on_values, r"take `tensor\.item\(\)` instead"),
        (after_a_way_for_compilers, "in branch_on_values"),
        (without_a_way_for_compilers, "in branch_on_values"),
        (counts, rf"it needs the number.*at .*{HERE} counts: for _ in range"),
        (loops_over_values, "the number of rounds of a loop"),
        (lambda m, x: no_fake(m.fc(x)), "no_fake.*register_fake"),
        (lambda m, x: m.fc(x) @ x, r"raised RuntimeError.*m\.fc\(x\) @ x"),
        (changes_a_parameter, "'fc.weight' in place"),
        (gives_a_buffer_a_gradient, "buffer 'mean'; detach"),
        (lambda m, x: m.fc(x) + m.plain.add_(1), "neither an input nor a buffer"),
        (gives_a_buffer_another_shape, "buffer 'mean'"),
        (lambda m, x: Holder(m.fc(x)), "out is a Holder"),
        (saves_on_the_host, "save_on_cpu"),
        (lambda m, x: m.fc(x) + META, "meta"),
    ],
)
def test_what_cannot_be_one_graph_names_its_line_and_a_remedy(forward, said):
    model = Net(forward, fc=linear(), mean=torch.zeros(4))
    model.plain = torch.zeros(4)
    assert re.search(said, refused(model, X), re.DOTALL)


def test_argument_object_changed_in_place():
    def forward(m, x, seen):
        seen[0] = x
        return m.fc(x)

    assert "changed an argument object" in refused(Net(forward, fc=linear()), X, [1])


def test_parameter_reached_past_its_module():
    model = Net(lambda m, x: m.fc(x) @ m.others[0].weight, fc=linear())
    model.others = [model.fc]
    capture(model, (X,))  # a module in a list is still the module
    model.others = [model.fc.weight]
    model._forward = lambda m, x: m.fc(x) @ m.others[0]
    assert "reaches 'fc.weight' past the module" in refused(model, X)


class Closes(nn.Module):
    """Reaches its weights through a closure that no copy of the module follows."""

    def __init__(self, reach: str, trainable: bool = True):
        super().__init__()
        self.fc = linear()
        self.fc.weight.requires_grad_(trainable)
        self.register_buffer("scale", torch.ones(4))
        self.view = self.fc.weight.T
        self.plain = torch.ones(4, requires_grad=True)
        self.fn = {
            "weight": lambda: self.fc.weight,
            "view": lambda: self.view,
            "buffer": lambda: self.scale,
            "plain": lambda: self.plain,
        }[reach]

    def forward(self, x):
        return self.fc(x) * self.fn().sum()


@pytest.mark.parametrize(
    ("reach", "trainable", "said"),
    [
        ("weight", True, "'fc.weight' past the module"),
        ("weight", False, "'fc.weight' past the module"),
        ("view", True, "'fc.weight' past the module"),
        ("buffer", True, "'scale' past the module"),
        ("plain", True, "would never be trained"),
    ],
)
def test_weights_reached_through_a_closure(reach, trainable, said):
    policy = graphshard.BlockPolicy({nn.Linear})
    with pytest.raises(CaptureError, match=said):
        graphshard.compile(Closes(reach, trainable), policy, example_inputs=(X,))


def test_gradient_lost_between_an_output_and_a_parameter():
    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = linear()

        def forward(self, x):
            return self.fc(x)

    model = Lost()
    captured = capture(model, (X,))
    from graphshard.capture.one_trace import _check_gradients
    from graphshard.capture.traced_module import TracedModel

    results = captured.program.results()
    results.grads[0] = None
    captured.program.set_results(results)
    traced = TracedModel(model, torch.empty_like, captured.inputs)
    traced.reachable = frozenset({0, 1})
    with pytest.raises(CaptureError, match=r"'fc\.weight' was lost"):
        _check_gradients(captured.program, traced)


def test_a_failed_capture_leaves_the_module_as_it_was():
    model = Net(branch_on_values, fc=linear())
    refused(model, X)
    assert type(model.fc.weight) is nn.Parameter
    assert not model._forward_hooks
    assert not model.fc._forward_pre_hooks
    model(X)


class _Assigns(nn.Module):
    def __init__(self, what, catches=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.what, self.catches = what, catches

    def forward(self, x):
        y = self.linear(x)
        try:
            tensor = {"weight": self.linear.weight, "seen": self.seen, "y": y}[self.what]
            tensor.data = tensor.data * 2
        except Exception:
            if not self.catches:
                raise
        return (y * self.seen).sum()


@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize(
    ("what", "named"),
    [("weight", "parameter 'linear.weight'"), ("seen", "buffer 'seen'"), ("y", "a tensor")],
)
def test_assigned_data_is_refused(what, named, catches):
    with pytest.raises(CaptureError, match=rf"assigns \.data of {named}, .*copy_") as raised:
        capture(_Assigns(what, catches), (torch.randn(2, 4),))
    assert "tensor.data = tensor.data * 2" in str(raised.value)
