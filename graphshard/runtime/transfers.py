"""What becomes of one tensor on its way into a collective or out of one: other dtype or device."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphshard import ops
from graphshard.runtime.group import Group


def cast(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`."""
    return tensor.to(dtype)


def to_device(tensor: Tensor, *, device: torch.device) -> Tensor:
    """`tensor` on `device`; itself, if it lies there."""
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` in the host's memory; itself, if it lies there."""
    return tensor.to("cpu")


for _transfer in (cast, to_device, to_host):
    _transfer.__module__ = "graphshard"  # fx prints a call by it: graphshard_cast(...)


def bind_transfer(node: fx.Node, group: Group) -> None:
    """Make `node`, a transfer of a lowered graph, the call of what moves or casts its tensor."""
    if node.target is ops.cast:
        node.target, node.kwargs = cast, {"dtype": node.kwargs["dtype"]}
    elif node.target is ops.to_host:
        node.target, node.kwargs = to_host, {}
    else:
        node.target, node.kwargs = to_device, {"device": group.device}
