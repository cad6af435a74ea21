"""CUDA streams beside the compute stream, and when the memory that they use may be given back.

See README.md for why that is safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.program import ops
from graphshard.program.collective import OneTensor


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
    """A stream beside the compute stream of a CUDA device.

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


class Copy:
    """A copy in transit.

    tensor: the new tensor.
    source: the tensor that is read; None after `arrive`.
    launched: the launch on a side stream; None where the copy is complete.
    """

    __slots__ = ("launched", "source", "tensor")

    def __init__(self, tensor: Tensor, source: Tensor, launched: Launched | None = None) -> None:
        self.tensor = tensor
        self.source: Tensor | None = source
        self.launched = launched

    def arrive(self) -> Tensor:
        """Make the compute stream wait for the copy, drop its source, return the new tensor."""
        if self.launched is not None:
            self.launched.join()
            self.launched = None
        self.source = None
        return self.tensor

    def hand_to(self, side_stream: SideStream | None) -> Tensor:
        """The new tensor, for work on `side_stream` alone; without one, for compute.

        Keep the copy until compute has waited for that work, then call `settle`.
        """
        if side_stream is None:
            return self.arrive()
        if self.launched is not None:
            side_stream.follow(self.launched)
        return self.tensor

    def settle(self) -> None:
        """Note that compute has waited for work behind the copy."""
        self.launched = self.source = None

    def __del__(self) -> None:
        if self.launched is not None:
            self.launched.drop()


def to_host(tensor: Tensor) -> Copy:
    """Start copying `tensor`, with its strides and dtype, to the host."""
    host = new_host(tensor)
    return Copy(host, tensor, _copy(host, tensor, tensor.device, "out"))


def to_device(tensor: Tensor, *, device: torch.device) -> Copy:
    """Start copying `tensor`, which is on the host, to `device`, with its strides and dtype."""
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return Copy(new, tensor, _copy(new, tensor, device, "in"))


def new_host(like: Tensor) -> Tensor:
    """An empty tensor on the host with the shape, strides and dtype of `like`.

    Its memory is pinned if `like` is on a CUDA device.
    """
    return torch.empty_strided(
        like.size(), like.stride(), dtype=like.dtype, device="cpu", pin_memory=like.is_cuda
    )


def arrive(copy: Copy) -> Tensor:
    """The copied tensor, complete for all work that is queued from here on."""
    return copy.arrive()


def wait_for_copies(device: torch.device) -> None:
    """Return once every copy between `device` and the host is complete.

    The host waits. Afterwards the CPU may read copies on the host and overwrite their sources.
    """
    for direction in ("in", "out"):
        side_stream = copy_stream(device, direction)
        if side_stream is not None:
            side_stream.synchronize()


def _copy(new: Tensor, source: Tensor, device: torch.device, direction: str) -> Launched | None:
    """Copy on the side stream of `direction` ("in" or "out"); None if the copy is complete."""
    side_stream = copy_stream(device, direction)
    if side_stream is None:
        new.copy_(source)
        return None
    return side_stream.launch(_copy_async, new, source)


def _copy_async(new: Tensor, source: Tensor) -> None:
    new.copy_(source, non_blocking=True)


def cast(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`; itself if it has that dtype."""
    return tensor.to(dtype)


for _transfer in (cast, to_device, to_host, arrive):
    _transfer.__module__ = "graphshard"  # fx prints a call by it: graphshard_cast(...)


def bind_transfer(node: fx.Node, device: torch.device) -> None:
    """Make `node`, a transfer of a lowered graph, call the function that runs it on this rank."""
    if node.target is ops.cast:
        node.target, node.kwargs = cast, {"dtype": OneTensor.of(node).dtype}
    elif node.target is ops.to_host:
        node.target, node.kwargs = to_host, {}
    elif node.target is ops.arrive:
        node.target, node.kwargs = arrive, {}
    else:
        node.target, node.kwargs = to_device, {"device": device}
