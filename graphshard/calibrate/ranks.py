"""What a calibration does between ranks: its group, the collectives it times, and optimizers.

Collectives are those of a lowered program (see `lower.kind_of`), so what is measured is what a step
does: copies, packing and averaging included.
"""

from __future__ import annotations

import os
import socket
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
from graphshard.runtime.lower import kind_of

_TIMEOUT = timedelta(minutes=5)


@contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """The group of the ranks that torchrun started, or a single rank where nothing did.

    A process group that exists already is used and left as it is.

    Args:
        device: where to measure: "cuda" with NCCL, "cpu" with Gloo.

    Raises:
        CostError: this build of torch has no backend for the ranks.
    """
    ours = not (dist.is_available() and dist.is_initialized())
    if ours and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not (dist.is_available() and dist.is_backend_available(backend)):
            raise CostError(
                f"ranks on {device.type} talk over {backend}, which this build of torch lacks; "
                "measure a single rank, or install a build that has it"
            )
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        ours = False
    try:
        yield find_group(None, device, alone=device)
    finally:
        if ours:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Places:
    """Where the ranks are. `within`: those on this rank's host; `between`: one of each host."""

    hosts: int
    per_host: int
    within: Group | None
    between: Group | None


def places(group: Group) -> Places:
    """Find out which ranks share a host, and make the groups to measure within and between hosts.

    Every rank makes them at the same point.

    Raises:
        CostError: the hosts have different numbers of ranks.
    """
    hosts = group.everyones(os.environ.get("NCCL_HOSTID") or socket.gethostname())
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
        return Places(1, per_host, group if group.size > 1 else None, None)
    own = members[hosts[group.rank]]
    turn = own.index(group.rank)
    across = [ranks[turn] for ranks in members.values()]
    return Places(
        len(members),
        per_host,
        _part(own, group) if per_host > 1 else None,
        _part(across, group),
    )


def _part(ranks: list[int], group: Group) -> Group:
    made = new_process_group(ranks, group.process_group)
    return Group(
        made,
        dist.get_rank(made),
        len(ranks),
        group.device,
        backend=group.backend,
        timeout=group.timeout,
    )


@dataclass
class TimedCollective:
    """One collective of `tensors` parameters that have `size` bytes in all, from launch to free."""

    op: Any
    ranks: Group
    tensors: int
    size: int
    group: str = "collectives"
    wall: bool = True
    _call: Callable[[], Any] = field(init=False, repr=False)
    _done: Callable[[Any], None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.ranks.size
        rows = max(1, self.size // (4 * self.tensors * n))
        self.size = rows * 4 * self.tensors * n  # as it is moved
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
        given = [torch.ones(numel, device=self.ranks.device) for _ in layouts]
        self._call = lambda: collective(given)
        self._done = _end

    @property
    def name(self) -> str:
        """Of the collective."""
        return str(self.op.__name__)

    def start(self) -> Any:
        """Launch it."""
        return self._call()

    def finish(self, pending: Any) -> None:
        """Wait for it, and free what it gathered."""
        self._done(pending)

    def run(self, times: int) -> None:
        """Launch and finish it, time after time."""
        for _ in range(times):
            self.finish(self.start())


def _end(pending: Any) -> None:
    results = wait(pending)
    if isinstance(results, Gathered):
        free(results)


@dataclass
class TimedCompute:
    """Matrix products, alone or while `under` is under way: what communication takes from them."""

    product: Tensor
    count: int
    under: TimedCollective | None
    group: str = "contention"
    wall: bool = True

    def run(self, times: int) -> None:
        """`count` products, time after time."""
        for _ in range(times):
            pending = None if self.under is None else self.under.start()
            for _ in range(self.count):
                torch.mm(self.product, self.product)
            if self.under is not None:
                self.under.finish(pending)


@dataclass
class TimedOptimizer:
    """The step of an optimizer over `tensors` parameters of `numel` elements on this rank."""

    name: str
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    tensors: int
    numel: int
    ranks: Group
    group: str = "optimizers"
    wall: bool = False
    _step: Callable[[], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        made = [self._parameter() for _ in range(self.tensors)]
        for param in made:
            param.grad = torch.ones_like(param)
        self._step = self.make(made).step

    @property
    def size(self) -> int:
        """Bytes of the shards."""
        return 4 * self.tensors * self.numel

    def _parameter(self) -> nn.Parameter:
        local = torch.ones(self.numel, device=self.ranks.device)
        if self.ranks.mesh is None:
            return nn.Parameter(local)
        return nn.Parameter(DTensor.from_local(local, self.ranks.mesh, [ShardDim(0)]))

    def run(self, times: int) -> None:
        """Step after step."""
        for _ in range(times):
            self._step()


@dataclass
class HostCopy:
    """A copy of `size` bytes from the device to the host and back, as offloading makes them."""

    device: torch.device
    size: int
    group: str = "host copies"
    wall: bool = True
    name: str = "to_host, to_device"

    def run(self, times: int) -> None:
        """There and back, time after time."""
        given = torch.ones(self.size // 4, device=self.device)
        for _ in range(times):
            there = arrive(to_host(given))
            arrive(to_device(there, device=self.device))
