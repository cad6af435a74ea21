"""Steps that are timed whole: one of next to no compute, and that of a small transformer.

The first shows the overhead of a step besides its operators: Python, autograd, checks between
ranks. The second shows how much longer operators take within a step than one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from graphshard.api import compile as compile_module
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import BlockPolicy, SizePolicy
from graphshard.runtime.group import Group
from graphshard.simulation import simulate

_WIDTH = 8


_LAYERS = 12


LEAST = 0.5
"""No step is twice as fast as its operators; a shorter one was measured wrongly."""


@dataclass
class TimedStep:
    """Forward and backward of a sharded module that returns a loss of `x`, without an optimizer.

    wall: whether ranks take part in one another's step.
    """

    module: nn.Module
    x: Tensor
    wall: bool = False
    group: str = "overhead"

    def run(self, times: int) -> None:
        """Run `times` steps."""
        for _ in range(times):
            with torch.enable_grad():
                self.module(self.x).backward()
            for param in self.module.parameters():
                param.grad = None

    def overhead(self, seconds: float, hardware: Hardware) -> float:
        """Return how many of a step's `seconds` exceed the estimate on `hardware`."""
        estimate = simulate(self.module, hardware=hardware, optimizer="none")
        return max(0.0, seconds - estimate.step_seconds)

    def factor(self, seconds: float, hardware: Hardware) -> float:
        """`Hardware.in_step` by which the estimate on `hardware` takes `seconds` a step."""
        estimate = simulate(self.module, hardware=hardware, optimizer="none")
        measured = seconds - hardware.step_overhead
        return measured / estimate.timeline.seconds * hardware.in_step


def tiny_step(device: torch.device, wall: bool) -> TimedStep:
    """A step of a model with next to no compute."""
    torch.manual_seed(0)
    x = torch.ones(2, _WIDTH, device=device)
    model = _Tiny().to(device)
    return TimedStep(
        compile_module(model, SizePolicy(), example_inputs=(x,), device=device), x, wall
    )


def transformer_step(ranks: Group, size: StepSize) -> TimedStep:
    """A step of a small transformer on each rank by itself, while all ranks compute.

    Every rank must make one at the same point.
    """
    device = ranks.device
    torch.manual_seed(0)
    x = torch.randint(size.vocab, (size.samples, size.tokens), device=device)
    with device:
        model = _Transformer(size).to(size.dtype)
    module = compile_module(
        model, BlockPolicy({_Block}), mesh=_alone(device), example_inputs=(x,), device=device
    )
    return TimedStep(module, x)


def _alone(device: torch.device) -> DeviceMesh | None:
    """A mesh of this rank alone; None without a process group."""
    if not dist.is_initialized():
        return None
    ranks = torch.arange(dist.get_world_size(), device="cpu")[:, None]
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("ranks", "alone"))
    return mesh["alone"]


class _Tiny(nn.Module):
    """Layers so small that their operators take no longer than the calls."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


class StepSize(NamedTuple):
    """Sizes of the transformer whose step is timed; `width` is a multiple of 64."""

    layers: int
    width: int
    vocab: int
    samples: int
    tokens: int
    dtype: torch.dtype


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(samples, tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class _Transformer(nn.Module):
    def __init__(self, size: StepSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.Sequential(*(_Block(size.width) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


# -- views -----------------------------------------------------------------------------------------

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
