"""One rank of many, alone: collectives that take as long as they should, and move nothing.

A `StandIn` takes the place of the process group of a sharded module on torch's "fake" backend. What
is gathered is whatever was in memory, so losses mean nothing. Each collective is queued on the
current stream, behind the one before it as on a communicator, and takes `seconds_of(op, bytes of
the full tensors)`, by a kernel that waits. It occupies one multiprocessor and no bandwidth: what
real collectives take from compute that runs beside them is not seen here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from graphshard.cost.collective_cost import collective_seconds, group_shape
from graphshard.hardware.hardware import Hardware

Seconds = Callable[[str, int], float]


class Done:
    """A work that needs no waiting for."""

    def wait(self) -> bool:
        return True


class Delay:
    """Waits on the current stream of a device; on the CPU, the host waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cycles_per_second = self._measured() if device.type == "cuda" else 0.0

    def _measured(self) -> float:
        cycles = 20_000_000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
        return cycles / (begin.elapsed_time(end) / 1e3)

    def __call__(self, seconds: float) -> None:
        if seconds <= 0:
            return
        if self.device.type == "cuda":
            torch.cuda._sleep(max(1, int(seconds * self.cycles_per_second)))
        else:
            time.sleep(seconds)


class Communicator:
    """Notes collectives; each takes its time on the stream it is queued on, behind the last one.

    Without `seconds_of` they take none, and need no order either.
    """

    def __init__(self, device: torch.device, seconds_of: Seconds | None = None) -> None:
        self.device = device
        self.delay = Delay(device) if seconds_of is not None else None
        self.seconds_of = seconds_of
        self.calls: list[tuple[str, int]] = []
        self._last: Any = None

    def moved(self, *ops: str) -> int:
        """Bytes of the full tensors of these collectives."""
        return sum(size for op, size in self.calls if op in ops)

    def run(self, op: str, size: int) -> Done:
        """Note a collective over `size` bytes of full tensors, and wait as long as it takes."""
        self.calls.append((op, size))
        if self.delay is None:
            return Done()
        if self._last is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last)
        self.delay(self.seconds_of(op, size))
        if self.device.type == "cuda":
            self._last = torch.cuda.current_stream(self.device).record_event()
        return Done()


class StandIn:
    """The calls of a process group that a sharded module makes in a step.

    Torch's "fake" backend copies on the device instead of moving, once for each rank and tensor,
    which costs two systems that gather in different ways different amounts.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        return self._communicator.run("all_gather", sum(t.nbytes for t in outputs))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        return self._communicator.run("reduce_scatter", sum(t.nbytes for t in inputs))

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        return self._communicator.run("all_reduce", sum(t.nbytes for t in tensors))

    allreduce_coalesced = allreduce


class Noted:
    """A collective of `fully_shard`'s; its memory is as by default."""

    def __init__(self, communicator: Communicator, op: str) -> None:
        self.communicator, self.op = communicator, op

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        self.communicator.run(self.op, max(output_tensor.nbytes, input_tensor.nbytes))


def nothing_moves(
    model: nn.Module, device: torch.device, seconds_of: Seconds | None = None
) -> Communicator:
    """Let the collectives of `model`, graphshard's or `fully_shard`'s, only take their time.

    graphshard's must have been compiled on a "fake" group and without example inputs, and not be
    called yet, since programs are bound to their group.
    """
    communicator = Communicator(device, seconds_of)
    if isinstance(model, graphshard.ShardedModule):
        whole = model._graphshard.bindings.group
        assert whole.backend == "fake", "a group of ranks that do exist"
        assert not model.programs, "captured already; compile it without example inputs"
        for group in (whole, *whole.subgroups.values()):
            group.process_group = StandIn(communicator)
        return communicator
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Noted(communicator, "all_gather"))
            module.set_custom_reduce_scatter(Noted(communicator, "reduce_scatter"))
    return communicator


def modelled(hardware: Hardware, ranks: int) -> Seconds:
    """Seconds of collectives over `ranks` ranks of `hardware`, as `graphshard.simulate` has it."""
    shape = group_shape("shard", (ranks,), hardware.gpus_per_node, 0)

    def seconds_of(op: str, size: int) -> float:
        return collective_seconds(op, size, shape, hardware, tensors=1)

    return seconds_of
