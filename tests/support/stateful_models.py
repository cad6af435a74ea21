"""Models whose forward does something with Python state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphshard

LINEAR = graphshard.BlockPolicy({nn.Linear})
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.init()

    def init(self) -> None: ...

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.change(self.fc(x), *rest)

    def change(self, x: Tensor) -> Tensor:
        return x


def with_change(change: Callable[..., Any], init: Callable[[Any], None] | None = None) -> Any:
    body = {"change": change} | ({"init": init} if init else {})
    return type("Net", (Base,), {"__module__": change.__module__, **body})


def pair(kind: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = kind()
    return model, graphshard.compile(copy.deepcopy(model), LINEAR)


def assert_same(model: nn.Module, sharded: Any, *args: Any) -> None:
    assert torch.equal(sharded(X, *args), model(X, *args))


class Counter:
    def __init__(self) -> None:
        self.steps = 0
        self.log: list[int] = []


def count_in_namespace(self: Any, x: Tensor) -> Tensor:
    self.state.steps += 1
    return x * self.state.steps
