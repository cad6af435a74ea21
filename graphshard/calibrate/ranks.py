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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

from graphshard.errors import CostError
from graphshard.planning.layout import ParamLayout
from graphshard.policy.placement import SHARDED
from graphshard.program import ops
from graphshard.runtime.collectives import Operand, wait
from graphshard.runtime.gather import Gathered, free
from graphshard.runtime.group import Group, find_group, new_process_group
from graphshard.runtime.host_copies import arrive, to_device, to_host
from graphshard.runtime.hosts import hosts_by_rank
from graphshard.runtime.lower import kind_of

_TIMEOUT = timedelta(minutes=5)


@contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """Join the ranks that torchrun started, or make a group of one rank without torchrun.

    An existing process group is used and not destroyed.

    Args:
        device: the device to measure: "cuda" with NCCL, "cpu" with Gloo.

    Raises:
        CostError: this build of torch has no backend for the ranks.
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


@dataclass(frozen=True)
class HostGroups:
    """The hosts of the ranks, with groups of the ranks on this host, and of one rank per host."""

    hosts: int
    per_host: int
    within: Group | None
    between: Group | None


def host_groups(group: Group) -> HostGroups:
    """Find the ranks of each host, and make groups to measure within and between hosts.

    Every rank must call this at the same point.

    Raises:
        CostError: the hosts have different numbers of ranks.
    """
    hosts = hosts_by_rank(group)
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(sizes) > 1:
        raise CostError(
            f"the hosts have {sorted(sizes)} ranks; start equally many on each, so that they share "
            "their network alike"
        )
    per_host = sizes.pop()
    if len(members) == 1:
        return HostGroups(1, per_host, group if group.size > 1 else None, None)
    within = members[hosts[group.rank]]
    local_rank = within.index(group.rank)
    between = [ranks[local_rank] for ranks in members.values()]
    return HostGroups(
        len(members),
        per_host,
        _subgroup(within, group) if per_host > 1 else None,
        _subgroup(between, group),
    )


def _subgroup(ranks: list[int], group: Group) -> Group:
    process_group = new_process_group(ranks, group.process_group, group.device, callers=group.size)
    return Group(
        process_group,
        dist.get_rank(process_group),
        len(ranks),
        group.device,
        backend=group.backend,
        timeout=group.timeout,
    )


@dataclass
class TimedCollective:
    """A collective on `tensors` parameters of `size` bytes in all, from launch to free."""

    op: Any
    ranks: Group
    tensors: int
    size: int
    group: str = "collectives"
    wall: bool = True
    _launch: Callable[[], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.ranks.size
        rows = max(1, self.size // (4 * self.tensors * n))
        self.size = rows * 4 * self.tensors * n  # rounded to whole shards
        layouts = [
            ParamLayout(
                f"p{i}",
                (f"p{i}",),
                (rows * n,),
                torch.float32,
                requires_grad=True,
                placement=SHARDED,
                world_size=n,
            )
            for i in range(self.tensors)
        ]
        operands = [Operand(layout, torch.float32) for layout in layouts]
        op = ops.OPS[self.op]
        collective = kind_of(op, self.ranks)(self.ranks, "measured", "forward", operands)
        whole = op.takes is ops.Value.FULL
        if op.gives is op.takes:
            self.size = rows * 4 * self.tensors  # shards are moved
        numel = rows * n if whole else rows
        tensors = [torch.ones(numel, device=self.ranks.device) for _ in layouts]
        self._launch = lambda: collective(tensors)

    @property
    def name(self) -> str:
        """The collective's name."""
        return str(self.op.__name__)

    def start(self) -> Any:
        """Launch it and return its pending result."""
        return self._launch()

    def finish(self, pending: Any) -> None:
        """Wait for it, and free gathered tensors."""
        results = wait(pending)
        if isinstance(results, Gathered):
            free(results)

    def run(self, times: int) -> None:
        """Launch and finish it, `times` times."""
        for _ in range(times):
            self.finish(self.start())


@dataclass
class TimedCompute:
    """Matrix products, alone or while the collective `under` is under way."""

    product: Tensor
    count: int
    under: TimedCollective | None
    group: str = "contention"
    wall: bool = True

    def run(self, times: int) -> None:
        """Compute `count` products, `times` times."""
        for _ in range(times):
            pending = None if self.under is None else self.under.start()
            for _ in range(self.count):
                torch.mm(self.product, self.product)
            if self.under is not None:
                self.under.finish(pending)


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
