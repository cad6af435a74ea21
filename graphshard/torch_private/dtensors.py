"""DTensors: whole ones without torch's gather over Gloo, several meshes in one operator, reals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from graphshard.torch_private.coalesced import coalesced
from graphshard.torch_private.compat import dtensor_like, group_backend, local_tensor
from graphshard.torch_private.patches import dtensor_handlers, replace_dtensor_handler

aten = torch.ops.aten


def full_tensor(dtensor: Any) -> Tensor:
    """`dtensor.full_tensor()`, which every rank must call.

    torch gathers by a coalesced call. Over Gloo the end of one and the beginning of the next may
    overwrite memory, so a DTensor with dims that are split once each, by `Shard`, is gathered by
    another one there. It is of a dtype that the backend moves. The tensor shares the memory of one
    that is whole here.
    """
    mesh, local = dtensor.device_mesh, local_tensor(dtensor).detach()
    split = {
        mesh_dim: placement.dim if type(placement) is Shard else None
        for mesh_dim, placement in enumerate(dtensor.placements)
        if placement != Replicate() and mesh.size(mesh_dim) > 1
    }
    groups = {mesh_dim: mesh.get_group(mesh_dim) for mesh_dim in split}
    if (
        None in split.values()
        or len(set(split.values())) < max(1, len(split))
        or not dtensor.numel()
        or any(group_backend(group, local.device) != "gloo" for group in groups.values())
    ):
        return dtensor.full_tensor()
    for mesh_dim, dim in split.items():
        local = _whole(local, dim, dtensor.shape[dim], groups[mesh_dim])
    return local


def _whole(local: Tensor, dim: Any, total: int, group: Any) -> Tensor:
    """`local`, which the ranks of `group` have parts of as `Shard(dim)` splits, in one piece."""
    # Each rank has so many rows, the last ones fewer or none.
    size = group.size()
    rows = -(-total // size)
    mine = sent = local.movedim(dim, 0).contiguous()
    if len(mine) != rows:
        sent = mine.new_zeros((rows, *mine.shape[1:]))
        sent[: len(mine)] = mine
    received = mine.new_empty((size * rows, *mine.shape[1:]))
    if received.numel():
        coalesced(group, "allgather_into_tensor_coalesced", "gloo")([received], [sent]).wait()
    if dim == 0 and total == len(received):
        return received
    return received[:total].movedim(0, dim).clone(memory_format=torch.contiguous_format)


@cache
def let_meshes_mix() -> None:
    """Let `torch.stack` and `torch._foreach_mul_` by a number take several meshes, for good.

    A stack is a plain tensor then, the same on every rank. torch's `clip_grad_norm_` makes both
    calls, so it would refuse parameters of which some are split along one dim and some along two.
    """
    for op, handler in ((aten.stack.default, _stack), (aten._foreach_mul_.Tensor, _multiply)):
        replace_dtensor_handler(op, handler)


def _stack(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors: Sequence[Any] = args[0]
    by_mesh = _places_by_mesh(tensors)
    with _by_torch(op):
        if len(by_mesh) == 1:
            return op(*args, **kwargs)
        whole: list[Tensor] = list(tensors)
        for mesh, places in by_mesh.items():
            if mesh is not None:
                alike = torch.stack([tensors[place] for place in places])
                for place, one in zip(places, full_tensor(alike).unbind(), strict=True):
                    whole[place] = one
        return op(whole, *args[1:], **kwargs)


def _multiply(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors, *others = args
    with _by_torch(op):
        for places in _places_by_mesh(tensors).values():
            op([tensors[place] for place in places], *others, **kwargs)


@cache
def let_reals_be_views() -> None:
    """Let `torch.view_as_real` of a DTensor share its memory, for good, as optimizers need.

    torch gathers a vector first of which ranks have unequal parts, so that what an optimizer writes
    into the view is lost, and refuses one without dims.
    """
    replace_dtensor_handler(aten.view_as_real.default, _as_reals)


def _as_reals(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (tensor,) = args
    stride = (*(2 * step for step in tensor.stride()), 1)
    return dtensor_like(tensor, op(local_tensor(tensor)), ((*tensor.shape, 2), stride))


def _places_by_mesh(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(getattr(tensor, "device_mesh", None), []).append(place)
    return places


@contextmanager
def _by_torch(op: Any) -> Iterator[None]:
    """A context without the handler of `op`, which torch calls in place of its own rules."""
    handler = dtensor_handlers().pop(op)
    try:
        yield
    finally:
        dtensor_handlers()[op] = handler
