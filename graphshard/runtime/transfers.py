"""What becomes of one tensor on its way into a collective or out of one: other dtype or device."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphshard import ops
from graphshard.runtime.group import Group
from graphshard.runtime.host_copies import arrive, to_device, to_host


def cast(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`."""
    return tensor.to(dtype)


for _transfer in (cast, to_device, to_host, arrive):
    _transfer.__module__ = "graphshard"  # fx prints a call by it: graphshard_cast(...)


def bind_transfer(node: fx.Node, group: Group) -> None:
    """Make `node`, a transfer of a lowered graph, the call of what moves or casts its tensor."""
    if node.target is ops.cast:
        node.target, node.kwargs = cast, {"dtype": node.kwargs["dtype"]}
    elif node.target is ops.to_host:
        node.target, node.kwargs = to_host, {}
    elif node.target is ops.arrive:
        node.target, node.kwargs = arrive, {}
    else:
        node.target, node.kwargs = to_device, {"device": group.device}
