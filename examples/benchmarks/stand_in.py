"""One rank of many, alone: collectives that take as long as they should, and move what they can.

A `StandIn` takes the place of the process group of a sharded module on torch's "fake" backend. A
gather puts this rank's shard in the place of every rank's; a reduce takes this rank's part of its
own gradient; so a step computes something definite, if not what ranks would, and computes the same
however it is scheduled. Each collective is queued on the current stream, behind the one before it
as on a communicator, and takes `seconds_of(op, bytes of the full tensors)` besides, by a kernel
that waits. It occupies one multiprocessor and no bandwidth: what real collectives take from compute
that runs beside them is not seen here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Runs one thing after the other, on whatever streams they are queued."""

    def __init__(self, device: torch.device, seconds_of: Seconds | None = None) -> None:
        self.device = device
        self.delay = Delay(device)
        self.seconds_of = seconds_of
        self.calls: list[tuple[str, int]] = []
        self._last: Any = None

    def moved(self, *ops: str) -> int:
        """Bytes of the full tensors of these collectives."""
        return sum(size for op, size in self.calls if op in ops)

    @contextmanager
    def turn(self, op: str, size: int) -> Iterator[None]:
        """Behind the one before, and the time that `size` bytes take, what is queued inside."""
        self.calls.append((op, size))
        # In the capture of a graph nothing may wait for what is outside of it; the side stream
        # orders all.
        ordered = self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        if self._last is not None and ordered:
            torch.cuda.current_stream(self.device).wait_event(self._last)
        if self.seconds_of is not None:
            self.delay(self.seconds_of(op, size))
        yield
        if ordered:
            self._last = torch.cuda.current_stream(self.device).record_event()


class StandIn:
    """The calls of a process group that a sharded module makes in a step.

    Without `moves` they only note bytes. Torch's "fake" backend copies on the device instead of
    moving, once for each rank and tensor, which costs two systems that gather in different ways
    different amounts.
    """

    def __init__(self, rank: int, size: int, communicator: Communicator, moves: bool) -> None:
        self._rank, self._size, self._communicator = rank, size, communicator
        self._moves = moves

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        with self._communicator.turn("all_gather", sum(t.nbytes for t in outputs)):
            for whole, part in zip(outputs, inputs, strict=True) if self._moves else ():
                own = part.reshape(1, -1)
                if own.data_ptr() in range(whole.data_ptr(), whole.data_ptr() + whole.nbytes):
                    own = own.clone()  # gathered in place
                whole.view(self._size, -1).copy_(own.expand(self._size, -1))
        return Done()

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        with self._communicator.turn("reduce_scatter", sum(t.nbytes for t in inputs)):
            for part, whole in zip(outputs, inputs, strict=True) if self._moves else ():
                part.view(-1).copy_(whole.view(self._size, -1)[self._rank])
        return Done()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        with self._communicator.turn("all_reduce", sum(t.nbytes for t in tensors)):
            return Done()

    allreduce_coalesced = allreduce


def stand_in(
    sharded: graphshard.ShardedModule, seconds_of: Seconds | None = None, moves: bool = True
) -> Communicator:
    """Let `sharded`, compiled on a "fake" group and not called yet, communicate through `StandIn`s.

    It must have been compiled without example inputs, since programs are bound to their group.
    """
    whole = sharded._graphshard.bindings.group
    assert whole.backend == "fake", "a group of ranks that do exist"
    assert not sharded.programs, "captured already; compile it without example inputs"
    # What does not move needs no order either, and no event.
    communicator = Communicator(whole.device if moves else torch.device("cpu"), seconds_of)
    for group in (whole, *whole.subgroups.values()):
        group.process_group = StandIn(group.rank, group.size, communicator, moves)
    return communicator


class Noted:
    """A collective of `fully_shard`'s that moves nothing; its memory is as by default."""

    def __init__(self, communicator: Communicator, op: str) -> None:
        self.communicator, self.op = communicator, op

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        with self.communicator.turn(self.op, max(output_tensor.nbytes, input_tensor.nbytes)):
            pass


def nothing_moves(model: nn.Module) -> Communicator:
    """Let the collectives of `model`, graphshard's or `fully_shard`'s, only note their bytes."""
    if isinstance(model, graphshard.ShardedModule):
        return stand_in(model, moves=False)
    from torch.distributed.fsdp import FSDPModule

    communicator = Communicator(torch.device("cpu"))
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
