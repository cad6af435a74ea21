"""Copies between the device and the host, beside the compute.

A tensor on its way is a `Copy` until the program's `arrive` node. On CUDA the host waits for
copies only in `settle`, at the end of backward and of a forward without one, so code that
overwrites parameters between a forward and its backward must synchronise the device first.
Elsewhere each copy is made at once. See README.md for why memory is safe.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphshard.program import ops
from graphshard.program.collective import OneTensor
from graphshard.runtime.group import Group
from graphshard.runtime.streams import Launched, copy_stream


class Copy:
    """A copy under way: the new tensor, and what it is read from."""

    __slots__ = ("launched", "source", "tensor")

    def __init__(self, tensor: Tensor, source: Tensor, launched: Launched | None = None) -> None:
        self.tensor = tensor
        self.source: Tensor | None = source
        self.launched = launched  # None where the copy is made already

    def arrive(self) -> Tensor:
        """Make the compute stream wait for the copy, let go of what it was read from."""
        if self.launched is not None:
            self.launched.join()
            self.launched = None
        self.source = None
        return self.tensor

    def __del__(self) -> None:
        if self.launched is not None:
            self.launched.drop()


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
    for direction in ("in", "out"):
        side_stream = copy_stream(device, direction)
        if side_stream is not None:
            side_stream.synchronize()


def _copy(new: Tensor, source: Tensor, device: torch.device, direction: str) -> Launched | None:
    """Copy on the side stream of `direction`; None if it is done."""
    side_stream = copy_stream(device, direction)
    if side_stream is None:
        new.copy_(source)
        return None
    return side_stream.launch(_queued, new, source)


def _queued(new: Tensor, source: Tensor) -> None:
    new.copy_(source, non_blocking=True)


def cast(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`."""
    return tensor.to(dtype)


for _transfer in (cast, to_device, to_host, arrive):
    _transfer.__module__ = "graphshard"  # fx prints a call by it: graphshard_cast(...)


def bind_transfer(node: fx.Node, group: Group) -> None:
    """Make `node`, a transfer of a lowered graph, the call of what moves or casts its tensor."""
    if node.target is ops.cast:
        node.target, node.kwargs = cast, {"dtype": OneTensor.of(node).dtype}
    elif node.target is ops.to_host:
        node.target, node.kwargs = to_host, {}
    elif node.target is ops.arrive:
        node.target, node.kwargs = arrive, {}
    else:
        node.target, node.kwargs = to_device, {"device": group.device}
