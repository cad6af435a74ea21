"""The ranks of a calibration, and its benchmarks of collectives, optimizers and host copies.

The collectives are those of a lowered program (see `lower.kind_of`), so copies, packing and
averaging are measured too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

from graphshard.errors import CostError
from graphshard.runtime.group import Group, find_group
from graphshard.runtime.streams import arrive, to_device, to_host

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

    copies: optimizers with parameters of their own that take turns.
    """

    name: str
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    tensors: int
    numel: int
    ranks: Group
    copies: int = 1
    group: str = "optimizers"
    wall: bool = False
    _steps: list[Callable[[], Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = []
        for _ in range(self.copies):
            params = [self._parameter() for _ in range(self.tensors)]
            for param in params:
                param.grad = torch.ones_like(param)
            self._steps.append(self.make(params).step)
            self._steps[-1]()  # makes the state

    @property
    def size(self) -> int:
        """Bytes of this rank's shards."""
        return 4 * self.tensors * self.numel

    def _parameter(self) -> nn.Parameter:
        local = torch.ones(self.numel, device=self.ranks.device)
        if self.ranks.mesh is None:
            return nn.Parameter(local)
        return nn.Parameter(DTensor.from_local(local, self.ranks.mesh, [ShardDim(0)]))

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
