"""Modules that users write, on two ranks against eager."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import graphshard
from graphshard.capture.structure import take_apart


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def pruned(module: nn.Module) -> nn.Module:
    return prune.l1_unstructured(module, "weight", 0.5)


def reparametrized(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), change(nn.Linear(6, 6)), nn.Linear(6, 2))


def _like_eager(make: Callable[[], nn.Module], steps: int = 2) -> None:
    """Train `steps` of equal batches on all ranks, and compare values, gradients and state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks, and of the weight they assign
        eager = make()
        sharded = graphshard.compile(make(), graphshard.SizePolicy(10))
        optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, eager)]
        for step in range(steps):
            torch.manual_seed(step)
            x = torch.randn(4, 6)
            results = []
            for module, optim in zip((sharded, eager), optims, strict=True):
                torch.manual_seed(step)
                random.seed(step)
                numpy.random.seed(step)
                out = take_apart(module(x), name="out")[0]
                optim.zero_grad()
                sum(t.square().sum() for t in out if t.requires_grad).backward()
                results.append(out)
                optim.step()
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    state = sharded.full_state_dict(rank0_only=False)
    assert state.keys() == eager.state_dict().keys()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


class Reparametrized:
    """A check of a model with a layer that a function of torch changes."""

    def __init__(self, name: str, change: Callable[[nn.Module], nn.Module]) -> None:
        self.__name__, self.change = name, change

    def __call__(self, rank: int) -> None:
        _like_eager(lambda: reparametrized(self.change))


class Assorted(nn.Module):
    """Parameters of unusual kinds, in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.mixing = nn.Parameter(torch.randn(3, 6, 2))
        self.order = nn.Parameter(torch.randperm(6), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.several = nn.ParameterList([torch.randn(6, 6), torch.randn(1), 3])
        self.named = nn.ParameterDict({"bias": torch.randn(6)})
        self.packed = nn.Parameter(torch.randn(5, 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.first, self.last = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = (x @ self.several[0])[:, self.order] * self.several[1] + self.named["bias"]
        z = torch.fft.fft(y) @ torch.view_as_complex(self.mixing).T
        logits = self.last(self.first(torch.arange(4)) * self.scale)
        return {"abs": z.abs() * self.mask, "logits": logits, "p": self.packed.float(), "n": None}


def unusual_parameters(rank: int) -> None:
    _like_eager(Assorted)


class Stateful(nn.Module):
    """A block that counts, warms up, and draws on the host; each call assigns or draws as eager."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.calls, self.first, self.gain = 0, True, 0.25

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.fc(x) * self.gain / self.calls
        if self.first:
            self.first, self.gain = False, 1.0
            x = x * 2
        kept = torch.tensor(numpy.random.choice([True, False], 6))
        order = [0, 1, 2]
        random.shuffle(order)
        return x[:, numpy.random.permutation(6)] * kept * (order[0] + 1)


def python_state_and_draws_on_the_host(rank: int) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Stateful() for _ in range(3)))
    _like_eager(lambda: copy.deepcopy(blocks), steps=4)


ON_TWO = [
    Reparametrized("old weight_norm", weight_norm),
    Reparametrized("new weight_norm", parametrizations.weight_norm),
    Reparametrized("old spectral_norm", spectral_norm),
    Reparametrized("new spectral_norm", parametrizations.spectral_norm),
    Reparametrized("orthogonal", parametrizations.orthogonal),
    Reparametrized("parametrization", symmetric),
    Reparametrized("pruning", pruned),
    unusual_parameters,
    python_state_and_draws_on_the_host,
]

test_on_two_ranks = on_ranks(ON_TWO, 2)
