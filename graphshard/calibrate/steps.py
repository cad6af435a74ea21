"""The ranks of a calibration, and what they time besides operators and collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from graphshard.api import compile as compile_module
from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import BlockPolicy, SizePolicy
from graphshard.runtime.group import Group, find_group
from graphshard.runtime.streams import arrive, to_device, to_host
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


# -- optimizers and host copies --------------------------------------------------------------------


_TIMEOUT = timedelta(minutes=5)


@contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """Join the ranks that torchrun started, or make a group of one rank without torchrun.

    An existing process group is used and not destroyed.
    """
    creates_group = not (dist.is_available() and dist.is_initialized())
    if creates_group and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not (dist.is_available() and dist.is_backend_available(backend)):
            raise CostError(
                f"ranks on {device.type} talk over {backend}, which this build of torch lacks; "
                "measure a single rank, or install a build that has it"
            )
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        creates_group = False
    try:
        yield find_group(None, device, alone=device)
    finally:
        if creates_group:
            dist.destroy_process_group()


@dataclass
class TimedOptimizer:
    """The step of an optimizer over `tensors` parameters of `numel` elements on this rank.

    They are plain tensors, as those that these optimizers step on in training (see
    `module/optimizers.py`). copies: optimizers with parameters of their own that take turns.
    """

    name: str
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    tensors: int
    numel: int
    device: torch.device
    copies: int = 1
    group: str = "optimizers"
    wall: bool = False
    _steps: list[Callable[[], Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = []
        for _ in range(self.copies):
            tensors = [torch.ones(self.numel, device=self.device) for _ in range(self.tensors)]
            params = [nn.Parameter(tensor) for tensor in tensors]
            for param in params:
                param.grad = torch.ones_like(param)
            self._steps.append(self.make(params).step)
            self._steps[-1]()  # makes the state

    @property
    def size(self) -> int:
        """Bytes of this rank's shards."""
        return 4 * self.tensors * self.numel

    def run(self, times: int) -> None:
        """Run `times` steps."""
        for turn in range(times):
            self._steps[turn % self.copies]()


@dataclass
class HostCopy:
    """A copy of `size` bytes from the device to the host and back, as offloading does."""

    device: torch.device
    size: int
    group: str = "host copies"
    wall: bool = True
    name: str = "to_host, to_device"

    def run(self, times: int) -> None:
        """Copy to the host and back, `times` times."""
        tensor = torch.ones(self.size // 4, device=self.device)
        for _ in range(times):
            on_host = arrive(to_host(tensor))
            arrive(to_device(on_host, device=self.device))
