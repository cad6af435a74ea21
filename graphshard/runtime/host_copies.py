"""Copies between the device and the host, beside the compute.

A tensor in transit is a `Copy` until the program's `arrive` node. On CUDA the host waits for copies
only in `wait_for_copies`, at the end of backward and of a forward without one. So code that
overwrites parameters between a forward and its backward must synchronise the device first.
Elsewhere each copy is made at once. See README.md for why memory is safe.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphshard.program import ops
from graphshard.program.collective import OneTensor
from graphshard.runtime.group import Group
from graphshard.runtime.streams import Launched, SideStream, copy_stream


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


def bind_transfer(node: fx.Node, group: Group) -> None:
    """Make `node`, a transfer of a lowered graph, call the function that runs it on this rank."""
    if node.target is ops.cast:
        node.target, node.kwargs = cast, {"dtype": OneTensor.of(node).dtype}
    elif node.target is ops.to_host:
        node.target, node.kwargs = to_host, {}
    elif node.target is ops.arrive:
        node.target, node.kwargs = arrive, {}
    else:
        node.target, node.kwargs = to_device, {"device": group.device}
