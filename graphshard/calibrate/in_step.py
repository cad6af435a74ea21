"""Measure how much longer operators take within a step than one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from graphshard.api import compile as compile_module
from graphshard.calibrate.overhead import run_steps
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import BlockPolicy
from graphshard.runtime.group import Group
from graphshard.simulation import simulate


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


@dataclass
class TransformerStep:
    """Forward and backward of a small transformer on each rank by itself, while all ranks compute.

    Every rank must make one at the same point.
    """

    ranks: Group
    size: StepSize
    group: str = "overhead"
    name: str = "transformer"
    wall: bool = False
    module: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        device = self.ranks.device
        torch.manual_seed(0)
        size = self.size.samples, self.size.tokens
        self._x = torch.randint(self.size.vocab, size, device=device)
        with device:
            model = _Transformer(self.size).to(self.size.dtype)
        self.module = compile_module(
            model,
            BlockPolicy({_Block}),
            mesh=self._alone(),
            example_inputs=(self._x,),
            device=device,
        )

    def _alone(self) -> DeviceMesh | None:
        """A mesh of this rank alone; None without a process group."""
        if not dist.is_initialized():
            return None
        ranks = torch.arange(dist.get_world_size(), device="cpu")[:, None]
        mesh = DeviceMesh(self.ranks.device.type, ranks, mesh_dim_names=("ranks", "alone"))
        return mesh["alone"]

    def run(self, times: int) -> None:
        """Run `times` steps without an optimizer."""
        run_steps(self.module, self._x, times)

    def factor(self, seconds: float, hardware: Hardware) -> float:
        """`Hardware.in_step` by which the estimate on `hardware` takes `seconds` a step."""
        estimate = simulate(self.module, hardware=hardware, optimizer="none")
        measured = seconds - hardware.step_overhead
        return measured / estimate.timeline.seconds * hardware.in_step


LEAST = 0.5
"""No step is twice as fast as its operators; a shorter one was measured wrongly."""
