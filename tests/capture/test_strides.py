"""Results lie in memory as eager's do, also where torch's fake kernels say otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard.capture.fake_mode import constant_folding_fake_mode

INPUTS: dict[str, Callable[[], Tensor]] = {
    "lines": lambda: torch.randn(2, 4, 3),
    "lines of channels": lambda: torch.randn(2, 3, 4).mT,
    "images": lambda: torch.randn(2, 4, 3, 5),
    "transposed images": lambda: torch.randn(2, 4, 5, 3).mT,
    "channels last": lambda: torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last),
    "volumes, channels last": lambda: torch.randn(2, 4, 3, 5, 2).to(
        memory_format=torch.channels_last_3d
    ),
    "transposed rows": lambda: torch.randn(4, 6).t(),
    "every second channel": lambda: torch.randn(2, 8, 3)[:, ::2],
    "expanded": lambda: torch.randn(2, 4, 1).expand(2, 4, 3),
    "one channel": lambda: torch.randn(2, 1, 3, 5),
}
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "like the input": torch.randn_like,
    "contiguous": lambda x: torch.randn(x.shape),
    "transposed": lambda x: torch.randn(x.mT.shape).mT,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", INPUTS)
def test_batch_norms_have_the_strides_of_the_kernel(name, gradient, training):
    x = INPUTS[name]()
    ones, zeros = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    forward = torch.ops.aten._native_batch_norm_legit_functional.default
    backward = torch.ops.aten.native_batch_norm_backward.default
    args = (x, ones, zeros, zeros, ones, training, 0.1, 1e-5)
    y, mean, rstd, *_ = forward(*args)
    grad = GRADIENTS[gradient](x)
    rest = (mean, rstd, training, 1e-5, [True, True, True])
    back = backward(grad, x, ones, zeros, ones, *rest)[0]
    mode = constant_folding_fake_mode()

    def fake(value: object) -> object:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    with mode:
        fake_y = forward(*map(fake, args))[0]
        fake_back = backward(*map(fake, (grad, x, ones, zeros, ones, *rest)))[0]
    assert fake_y.stride() == y.stride()
    assert fake_back.stride() == back.stride()


class Transposed(nn.Module):
    """`work` on a linear layer's result with channels before times."""

    def __init__(self, work: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.norm, self.linear(x).mT).mT


WORK = {
    "batch_norm": lambda norm, y: norm(y),
    "batch_norm, flattened": lambda norm, y: norm(y).flatten(1).unsqueeze(-1),
    # The real kernel gives rows where the fake one keeps columns.
    "power": lambda norm, y: (2.0**y).mT.flatten(1).unsqueeze(-1),
    "rounded quotient": lambda norm, y: (
        (y / 0.1 + torch.div(y, 0.25, rounding_mode="floor")).mT.flatten(1).unsqueeze(-1)
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WORK)
def test_values_behind_other_strides_than_traced_are_those_of_eager(name, training):
    torch.manual_seed(0)
    eager = Transposed(WORK[name]).train(training)
    policy = graphshard.LambdaPolicy(lambda _: False)
    sharded = graphshard.compile(copy.deepcopy(eager), policy).train(training)
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, got = eager(x), sharded(y)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()
    assert torch.equal(y.grad, x.grad)
    for mine, theirs in zip(sharded.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_norm", "power"])
def test_compiled_regions_take_them_too(name):
    torch.manual_seed(0)
    eager = Transposed(WORK[name])
    policy = graphshard.LambdaPolicy(lambda _: False)
    sharded = graphshard.compile(copy.deepcopy(eager), policy, backend="inductor")
    x = torch.randn(2, 3, 4)
    expected, got = eager(x), sharded(x)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(sharded.parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
