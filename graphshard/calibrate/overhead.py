"""Measure the overhead of a step besides its operators: Python, autograd, checks between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.api import compile as compile_module
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import SizePolicy
from graphshard.simulation import simulate

_WIDTH = 8


_LAYERS = 12


class _Tiny(nn.Module):
    """Layers so small that their operators take no longer than the calls."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


_COLD = 1 << 18
"""Elements of a copy that flushes a second-level cache."""


@dataclass
class Calls:
    """`count` views after a copy that flushes the cache; only the views are timed."""

    count: int
    group: str = "overhead"
    wall: bool = False

    def run(self, times: int) -> None:
        """Copy and take views, `times` times."""
        self.timed_run(times, time.perf_counter)

    def timed_run(self, times: int, clock: Callable[[], float]) -> float:
        """Return the seconds per view."""
        matrix = torch.ones(_COLD, device="cpu").view(512, -1)
        seconds = 0.0
        for _ in range(times):
            view = torch.ops.aten.clone.default(matrix)
            begin = clock()
            for _ in range(self.count):
                view = torch.ops.aten.t.default(view)
            seconds += clock() - begin
        return seconds / times / self.count


def run_steps(module: nn.Module, x: Tensor, times: int) -> None:
    """Run `times` forwards and backwards of `module`, which returns a loss."""
    for _ in range(times):
        with torch.enable_grad():
            module(x).backward()
        for param in module.parameters():
            param.grad = None


@dataclass
class TinyStep:
    """Forward and backward of a sharded model with next to no compute."""

    device: torch.device
    wall: bool
    group: str = "overhead"
    module: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self._x = torch.ones(2, _WIDTH, device=self.device)
        self.module = compile_module(
            _Tiny().to(self.device),
            SizePolicy(),
            example_inputs=(self._x,),
            device=self.device,
        )

    def run(self, times: int) -> None:
        """Run `times` steps without an optimizer."""
        run_steps(self.module, self._x, times)

    def overhead(self, seconds: float, hardware: Hardware) -> float:
        """Return how many of a step's `seconds` exceed the estimate on `hardware`."""
        estimate = simulate(self.module, hardware=hardware, optimizer="none")
        return max(0.0, seconds - estimate.step_seconds)
