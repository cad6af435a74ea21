"""CUDA streams beside the compute stream, and when the memory that they use may be given back.

At a launch a side stream waits for all work queued on the compute stream so far; at a wait the
compute stream waits for the event recorded behind the launched work. Tensors are allocated and
given back on the compute stream only, after it has waited for every use on a side stream. See
README.md for why that is safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class Launched:
    """A launch on a side stream: the event behind it, and the compute stream it came from."""

    __slots__ = ("_cuda", "compute", "event")

    def __init__(self, event: Any, compute: Any, cuda: Any) -> None:
        self.event = event
        self.compute = compute
        self._cuda = cuda

    def join(self) -> None:
        """Make the current stream, which computes, wait for the launch."""
        self._cuda.current_stream(self.compute.device).wait_event(self.event)

    def drop(self) -> None:
        """Make the stream it was launched from wait for it, whichever stream is current.

        An error is ignored: work in a failed CUDA graph capture never runs and cannot be waited
        for, and any other error of the device is raised again by the next call.
        """
        with contextlib.suppress(RuntimeError):
            self.compute.wait_event(self.event)


class SideStream:
    """A stream beside the compute stream.

    Args:
        device: a CUDA device.
        cuda: the module that creates streams: `torch.cuda`, or a recording one in tests.
        priority: of its kernels where several wait for the device; -1 is above compute's 0.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, *, priority: int = 0) -> None:
        self.device = device
        self.cuda = cuda
        self.stream = cuda.Stream(device, priority=priority)

    def launch(self, work: Callable[..., Any], *args: Any) -> Launched:
        """Call `work(*args)` with this stream current, behind all work queued on compute so far."""
        compute = self.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        with self.cuda.stream(self.stream):
            work(*args)
        return Launched(self.stream.record_event(), compute, self.cuda)

    def follow(self, launched: Launched) -> None:
        """Make this stream, but not compute, wait for a launch on another side stream."""
        self.stream.wait_event(launched.event)

    def synchronize(self) -> None:
        """Return once all work on the stream is done; the host waits."""
        self.stream.synchronize()


def communicator_stream(device: torch.device) -> SideStream | None:
    """The side stream of a communicator on a CUDA `device`; None on the CPU.

    NCCL's kernels go before those of compute: the few multiprocessors that they need are else
    occupied by matrix products until these end, and the other ranks wait.
    """
    return SideStream(device, priority=-1) if device.type == "cuda" else None


@cache
def copy_stream(device: torch.device, direction: str) -> SideStream | None:
    """The side stream for copies from the host ("in") or to it ("out"); None on the CPU."""
    return SideStream(device) if device.type == "cuda" else None
