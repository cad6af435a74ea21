"""Copies between the device and the host, beside the compute.

What is copied is a `Copy` until the program's `arrive` node, and a tensor from there on.

On CUDA copies run on two streams of their own, one for each direction, and the host never waits for
one within a step: its memory is pinned, so a copy is only queued. Who may use which memory when:

    to_host    The copy stream first waits for the compute stream, so what computed the tensor is
               done. `Copy` refers to the tensor until `arrive`, which makes the compute stream
               wait for the copy: only then can the tensor's memory on the device go to someone
               else, who runs on the compute stream, hence after the copy.
    to_device  The new tensor's memory belongs to the compute stream, and may be what a kernel
               queued there still reads; so the copy stream first waits for the compute stream.
               `arrive` makes the compute stream wait for the copy. A `Copy` that is dropped without
               `arrive` (an error in between) does so too, before the memory can go to someone else.
    host       Pinned memory comes from torch's caching host allocator, which gives a block to
               someone else once the copies queued when it was released are done (`copy_` tells it
               of them). What comes back was sent out before an earlier `arrive`, which the copy
               stream waits for with the compute stream, so a host tensor is whole when a stream
               reads it. With parameters offloaded the CPU reads gradients and overwrites
               parameters, so at the end of backward, and of a forward without one, the host waits
               for the copies, once (`settle`). Whoever overwrites parameters between a forward and
               its backward must synchronise the device first (its backward is an error anyway).

On ranks that compute on the CPU the host's memory and the device's are the same kind; each copy is
made all the same, at once, so that what runs is what the program says.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Copy:
    """A copy under way: the new tensor, what it is read from, and the event that ends it."""

    __slots__ = ("done", "source", "tensor")

    def __init__(self, tensor: Tensor, source: Tensor, done: Any = None) -> None:
        self.tensor = tensor
        self.source: Tensor | None = source
        self.done = done  # a torch.cuda.Event, None where the copy is made already

    def arrive(self) -> Tensor:
        """Make the compute stream wait for the copy, let go of what it was read from."""
        if self.done is not None:
            torch.cuda.current_stream(self.done.device).wait_event(self.done)
            self.done = None
        self.source = None
        return self.tensor

    def __del__(self) -> None:
        if self.done is not None:
            self.arrive()


def to_host(tensor: Tensor) -> Copy:
    """Start copying `tensor`, with its strides, to the host."""
    host = new_host(tensor)
    return Copy(host, tensor, _copy(host, tensor, tensor.device, "out"))


def to_device(tensor: Tensor, *, device: torch.device) -> Copy:
    """Start copying `tensor`, which lies on the host, to `device`, with its strides."""
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return Copy(new, tensor, _copy(new, tensor, device, "in"))


def new_host(like: Tensor) -> Tensor:
    """An empty tensor on the host, laid out as `like`; pinned if that lies on a CUDA device."""
    return torch.empty_strided(
        like.size(), like.stride(), dtype=like.dtype, device="cpu", pin_memory=like.is_cuda
    )


def arrive(copy: Copy) -> Tensor:
    """What was copied, for whatever is queued from here on."""
    return copy.arrive()


def settle(device: torch.device) -> None:
    """Return once every copy between `device` and the host that `arrive`d is made.

    The host waits: from here on the CPU may read what went to the host, and overwrite what came
    from there.
    """
    if device.type == "cuda":
        for direction in ("in", "out"):
            _stream(device, direction).synchronize()


def _copy(new: Tensor, source: Tensor, device: torch.device, direction: str) -> Any:
    """Copy on the stream of `direction`; the event after it, None if it is done."""
    if device.type != "cuda":
        new.copy_(source)
        return None
    stream = _stream(device, direction)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        new.copy_(source, non_blocking=True)
        return stream.record_event()


@cache
def _stream(device: torch.device, direction: str) -> Any:
    return torch.cuda.Stream(device)
