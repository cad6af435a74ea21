"""What cannot be one graph is refused with the user's own line and a remedy."""

from __future__ import annotations

import re

import pytest
import torch
from capture_models import Net, X, linear
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError


def refused(model, *args, **kwargs) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, args, kwargs)
    return str(caught.value)


def branch_on_values(m, x):
    if m.fc(x).sum() > 0:  # the line at fault
        return x
    return -x


def test_control_flow_on_values_names_the_line():
    message = refused(Net(branch_on_values, fc=linear()), X)
    assert re.search(r"test_capture_errors\.py:\d+ in branch_on_values: if m\.fc\(x\)", message)
    assert "control flow depends on the values" in message
    assert "torch.where" in message


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


def test_what_is_in_the_way_of_compilers_too_is_named():
    def forward(m, x):
        return branch_on_values(m, warn_of_padding(m, x))

    assert "in branch_on_values" in refused(Net(forward, fc=linear()), X)


def test_another_fault_in_the_way_for_compilers_hides_nothing():
    def forward(m, x):
        if torch.compiler.is_compiling():
            raise RuntimeError("no compilers here")
        return branch_on_values(m, x)

    assert "in branch_on_values" in refused(Net(forward, fc=linear()), X)


def test_a_number_that_the_model_counts_to_is_refused():
    def forward(m, x):
        for _ in range((x > 0).sum().item()):  # the line at fault
            x = m.fc(x)
        return x

    message = refused(Net(forward, fc=linear()), X)
    assert "it needs the number" in message
    assert re.search(r"at .*test_capture_errors\.py:\d+ in forward: for _ in range", message)


def test_a_loop_over_values_is_refused():
    def forward(m, x):
        for row in (x[:, 0] > 0).nonzero()[:, 0].tolist():
            x = x + m.fc(x)[row]
        return x

    message = refused(Net(forward, fc=linear()), X)
    assert "the number of rounds of a loop" in message


def test_a_question_about_a_size_names_the_check_that_answers_it():
    def forward(m, x):
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        if rows.numel() == 3:
            return m.fc(x)
        return m.fc(x[rows])

    message = refused(Net(forward, fc=linear()), X)
    assert re.search(r"this line asks whether u\d+ == 3", message)
    assert "torch._check(u" in message
    assert re.search(r"u\d+ is read at .*: rows = \(x\[:, 0\] > 0\)", message)


@torch.library.custom_op("graphshard_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_operator_without_fake_kernel():
    message = refused(Net(lambda m, x: no_fake(m.fc(x)), fc=linear()), X)
    assert "no_fake" in message
    assert "register_fake" in message


def test_a_bug_in_the_model_is_shown_at_its_line():
    message = refused(Net(lambda m, x: m.fc(x) @ x, fc=linear()), X)
    assert "raised RuntimeError" in message
    assert "m.fc(x) @ x" in message


def test_parameter_changed_in_forward():
    def forward(m, x):
        with torch.no_grad():
            m.fc.weight.mul_(0.9)
        return m.fc(x)

    assert "'fc.weight' in place" in refused(Net(forward, fc=linear()), X)


def test_buffer_given_a_value_with_a_gradient():
    def forward(m, x):
        h = m.fc(x)
        m.mean.add_(h.mean(0))
        return h - m.mean

    message = refused(Net(forward, fc=linear(), mean=torch.zeros(4)), X)
    assert "buffer 'mean'; detach" in message


def test_plain_tensor_changed_in_place():
    model = Net(lambda m, x: m.fc(x) + m.seen.add_(1), fc=linear())
    model.seen = torch.zeros(4)
    assert "neither an input nor a buffer" in refused(model, X)


def test_buffer_assigned_another_shape():
    def forward(m, x):
        m.state = x
        return m.fc(x)

    assert "buffer 'state'" in refused(Net(forward, fc=linear(), state=torch.zeros(1)), X)


def test_argument_object_changed_in_place():
    def forward(m, x, seen):
        seen[0] = x
        return m.fc(x)

    assert "changed an argument object" in refused(Net(forward, fc=linear()), X, [1])


def test_object_that_cannot_be_taken_apart():
    class Holder:
        def __init__(self, x):
            self.x = x

        def __reduce__(self):
            raise TypeError("no")

    assert "out is a Holder" in refused(Net(lambda m, x: Holder(m.fc(x)), fc=linear()), X)


def test_saved_tensor_hooks():
    def forward(m, x):
        with torch.autograd.graph.save_on_cpu():
            return m.fc(x)

    assert "save_on_cpu" in refused(Net(forward, fc=linear()), X)


def test_constant_on_meta():
    table = torch.empty(4, device="meta")
    message = refused(Net(lambda m, x: m.fc(x) + table, fc=linear()), X)
    assert "meta" in message


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
    from graphshard.capture.entry import _check_gradients
    from graphshard.capture.traced_module import TracedModel

    results = captured.program.results()
    results.grads[0] = None
    captured.program.set_results(results)
    traced = TracedModel(model, torch.empty_like, captured.inputs)
    traced.reachable = frozenset({0, 1})
    with pytest.raises(CaptureError, match=r"'fc\.weight' was lost"):
        _check_gradients(captured.program, traced)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_regions_are_tagged(use_reentrant):
    model = Net(
        lambda m, x: m.c(checkpoint(m.b, m.a(x), use_reentrant=use_reentrant)),
        a=linear(), b=linear(), c=linear(),
    )  # fmt: skip
    program = capture(model, (X,)).program
    tagged = {n.meta["fqn"] for n in program.nodes() if "recompute_region" in n.meta}
    assert tagged == {"b"}


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
