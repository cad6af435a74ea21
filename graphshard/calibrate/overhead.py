"""What a step takes besides its operators: Python, autograd, tickets between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.api import compile as compile_module
from graphshard.api import simulate
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import SizePolicy

_WIDTH = 8


_LAYERS = 12


class _Tiny(nn.Module):
    """Layers whose operators take no longer than their calls."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


_COLD = 1 << 18
"""Elements of a copy that leaves no second-level cache as it was."""


@dataclass
class Calls:
    """`count` views after a copy that leaves no cache as it was; only they are timed."""

    count: int
    group: str = "overhead"
    wall: bool = False

    def run(self, times: int) -> None:
        """Copy and take views, time after time."""
        self.clocked(times, time.perf_counter)

    def clocked(self, times: int, clock: Callable[[], float]) -> float:
        """Seconds per view."""
        given = torch.ones(_COLD).view(512, -1)
        taken = 0.0
        for _ in range(times):
            view = torch.ops.aten.clone.default(given)
            begin = clock()
            for _ in range(self.count):
                view = torch.ops.aten.t.default(view)
            taken += clock() - begin
        return taken / times / self.count


@dataclass
class TinyStep:
    """Forward and backward of a sharded model that has next to nothing to compute."""

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
        """Step after step, without an optimizer."""
        for _ in range(times):
            with torch.enable_grad():
                self.module(self._x).backward()
            for param in self.module.parameters():
                param.grad = None

    def beyond(self, seconds: float, hardware: Hardware) -> float:
        """What of a step's `seconds` the nodes do not explain, on `hardware` as measured so far."""
        estimate = simulate(self.module, hardware=hardware, optimizer="none")
        return max(0.0, seconds - estimate.step_seconds)
