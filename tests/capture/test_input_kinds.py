"""Inputs that are more than dense values are refused at every call, or noted once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from capture_models import Net, linear
from torch import Tensor

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError


class Image(Tensor):
    pass


class Turned(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return -super().__torch_function__(func, types, args, kwargs or {})


REFUSED: dict[str, tuple[Any, str]] = {
    "class": (lambda x: x.as_subclass(Turned), "Turned, and a program would not run its own __tor"),
    "sparse": (lambda x: x.to_sparse(), r"layout torch.sparse_coo, .*so pass to_dense\(\)"),
    "compressed": (lambda x: x.to_sparse_csr(), "layout torch.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "is a nested tensor"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), "torch.MaskedTensor"),
    "integers": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "is quantized .torch.qint8",
    ),
    "conjugate": (lambda x: torch.complex(x, x).conj(), r"conjugated .*resolve_conj\(\)"),
    "negative": (lambda x: torch.complex(x, x).conj().imag, "negated when it is read"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inputs_a_program_cannot_take(name: str) -> None:
    make, said = REFUSED[name]
    model = Net(lambda m, batch: m.fc(torch.ones_like(batch["x"])), fc=linear())
    odd = make(torch.randn(2, 4))
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    sharded({"x": torch.randn(2, 4)})
    with pytest.raises(CaptureError, match=said) as raised:
        sharded({"x": odd})
    assert str(raised.value).startswith("args[0]['x'] ")
    assert len(sharded.programs) == 1
    with pytest.raises(CaptureError, match=said):
        capture(model, ({"x": odd},))


def test_a_program_of_plain_complex_numbers_is_not_used_for_conjugates() -> None:
    model = Net(lambda m, z: m.fc(torch.view_as_real(z).flatten(1)), fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    z = torch.randn(3, 2, dtype=torch.complex64)
    assert torch.equal(sharded(z), model(z))
    with pytest.raises(CaptureError, match="resolve_conj"):
        sharded(z.conj())


def test_a_class_that_adds_nothing_is_noted_once() -> None:
    model = Net(lambda m, x: m.fc(x), fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    x = torch.randn(2, 4, requires_grad=True)
    expected = sharded(x)
    image = x.detach().as_subclass(Image).requires_grad_()
    with pytest.warns(UserWarning, match=r"args\[0\] is a .*Image; .* sees a plain tensor"):
        result = sharded(image)
    assert type(result) is Tensor
    assert torch.equal(result, expected)
    for out in (result, expected):
        out.square().sum().backward()
    assert torch.equal(image.grad.as_subclass(Tensor), x.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(image)
        sharded(torch.nn.Parameter(x))
    assert len(sharded.programs) == 1
