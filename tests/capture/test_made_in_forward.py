"""Parameters and buffers that a forward makes at its first call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from capture_models import Net, X, linear
from torch import Tensor, nn

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError


def makes_parameter(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m.fc, "scale"):
        m.fc.scale = nn.Parameter(torch.ones(4))
    return m.fc(x) * m.fc.scale


def makes_module(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "last"):
        m.last = nn.Linear(4, 4)
    return m.last(m.fc(x))


@pytest.mark.parametrize(
    ("forward", "names"),
    [(makes_parameter, r"fc\.scale"), (makes_module, r"last\.weight, last\.bias")],
)
def test_parameters_made_in_forward_are_refused(forward: Any, names: str) -> None:
    model = Net(forward, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    with pytest.raises(CaptureError, match=rf"makes parameters \({names}\), .*call the model once"):
        sharded(X)
    model(X)
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    assert torch.equal(sharded(X), model(X))


def registers(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "table"):
        m.register_buffer("table", torch.arange(4.0))
    return m.fc(x) + m.table


def fills(m: Any, x: Tensor) -> Tensor:
    if m.fc.table is None:
        m.fc.table = torch.arange(4.0)
    return m.fc(x) + m.fc.table


@pytest.mark.parametrize(("forward", "name"), [(registers, "table"), (fills, r"fc\.table")])
def test_buffers_made_in_forward_are_noted(forward: Any, name: str) -> None:
    model = Net(forward, fc=linear())
    model.fc.register_buffer("table", None)
    with pytest.warns(UserWarning, match=rf"assigns {name} \(a buffer it makes itself"):
        capture(model, (X,))
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, (X,))


def forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x.requires_grad_()
    energy = m.fc(x).tanh().sum()
    (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, -gradient


@pytest.mark.parametrize("tracked", [False, True])
def test_inputs_that_a_forward_differentiates(tracked: bool) -> None:
    model = Net(forces, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    results = []
    for each in (sharded, model):
        x = X.clone().requires_grad_(tracked)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out = each(x)
        if each is sharded:
            noted = [w for w in said if "requires_grad_() on args[0]" in str(w.message)]
            assert len(noted) == (not tracked)
        out[1].square().sum().backward()
        grad = x.grad.tolist() if tracked else None
        results.append([*(t.tolist() for t in out), each.fc.weight.grad.tolist(), grad])
    assert results[0] == results[1]
