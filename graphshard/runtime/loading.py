"""Values of the whole model into shards: from a full state dict, or from the first rank's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError, FingerprintError
from graphshard.runtime.shards import Shard, distinct
from graphshard.runtime.step import Bindings


def as_sharded(state_dict: Mapping[str, Any], shards: Mapping[str, Shard]) -> dict[str, Any]:
    """`state_dict` with this rank's part in place of each full tensor of a sharded parameter."""
    own = dict(state_dict)
    for name, value in state_dict.items():
        shard = shards.get(name)
        if shard is None or shard.group.mesh is None or not isinstance(value, Tensor):
            continue
        # A tensor of another shape is left for torch to report.
        if not isinstance(value, DTensor) and tuple(value.shape) == shard.layout.shape:
            part = shard.part_of(value.detach()).to(shard.group.device, shard.layout.dtype)
            own[name] = shard.as_dtensor(part.contiguous())
    return own


def load_full(module: nn.Module, bindings: Bindings, state_dict: Mapping[str, Any]) -> None:
    """Take full values from every rank's `state_dict`, or rank 0's where all others are empty.

    Raises:
        CheckpointError: on every rank, if one that counts does not fit; nothing was changed.
    """
    group = bindings.group
    persistent = module.state_dict(keep_vars=True)
    reports = group.everyones((not state_dict, _problem(persistent, bindings, state_dict)))
    from_first = group.size > 1 and all(empty for empty, _ in reports[1:]) and not reports[0][0]
    for rank, (_, problem) in enumerate(reports[:1] if from_first else reports):
        if problem is not None:
            raise CheckpointError(f"{problem} (on rank {rank})" if group.size > 1 else problem)

    def full(name: str, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        value = state_dict.get(name)
        if from_first:
            return group.from_first(value, tuple(shape), dtype)
        assert value is not None
        return value

    for shard in distinct(bindings.shards):
        # Ranks with nothing to give must name the same tensor as the rank that has it, and any
        # name of a tied parameter will do, so the choice is the first rank's.
        name = next((n for n in shard.layout.names if n in state_dict), shard.layout.fqn)
        shard.set_full(full(name, shard.layout.shape, shard.layout.dtype))
    with torch.no_grad():
        for name in bindings.buffers:
            if name in persistent:
                buffer = bindings.buffer(name)
                buffer.copy_(full(name, buffer.shape, buffer.dtype))


def _problem(
    persistent: Mapping[str, Any], bindings: Bindings, state_dict: Mapping[str, Any]
) -> str | None:
    """What keeps `state_dict` from being loaded, if anything."""
    if not state_dict:
        return (
            "the state dict is empty; pass the whole model's on every rank, or on rank 0 with "
            "None on all others"
        )
    for name, own in persistent.items():
        if not isinstance(own, Tensor):
            continue
        shard = bindings.shards.get(name)
        names = (name,) if shard is None else shard.layout.names
        if not any(other in state_dict for other in names):
            return f"the state dict has no {name!r}; it must have every parameter and buffer"
    for name, value in state_dict.items():
        own = persistent.get(name)
        if own is None:
            return f"the state dict has {name!r}, which the model has not; remove or rename it"
        if isinstance(value, DTensor) or not isinstance(value, Tensor):
            return (
                f"{name!r} is a {type(value).__name__}; load_full_state_dict takes full plain "
                "tensors, load_state_dict takes DTensors"
            )
        if value.shape != own.shape:
            return (
                f"{name!r} has shape {list(value.shape)} in the state dict and "
                f"{list(own.shape)} in the model"
            )
    return None


def take_over(model: nn.Module, bindings: Bindings, *, from_first: bool) -> frozenset[str]:
    """Fill shards and buffers from `model`; what is on meta is left without values.

    Args:
        model: every rank's own, with real weights or on meta.
        bindings: what to fill.
        from_first: every rank takes rank 0's values (the others may be on meta).

    Raises:
        FingerprintError: on every rank, if one's model is not like rank 0's.

    Returns:
        Every name of the parameters and buffers left without values.
    """
    group = bindings.group
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors: dict[str, Tensor] = {**params, **buffers}
    real = {name for name, tensor in tensors.items() if tensor.device.type != "meta"}
    if from_first:
        shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
        given = group.everyones((real, shapes))
        real = given[0][0]
        _require_equal_shapes([theirs for _, theirs in given])

    def value(name: str) -> Tensor:
        tensor = tensors[name].detach()
        return group.from_first(tensor, tensor.shape, tensor.dtype) if from_first else tensor

    for shard in distinct(bindings.shards):
        if shard.layout.fqn in real:
            shard.set_full(value(shard.layout.fqn))
    with torch.no_grad():
        for name in buffers:
            if name in real:
                bindings.buffer(name).copy_(value(name))
    return frozenset(tensors) - real


def _require_equal_shapes(by_rank: Sequence[Mapping[str, Any]]) -> None:
    first = by_rank[0]
    for rank, theirs in enumerate(by_rank):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise FingerprintError(
                    f"rank {rank}'s model is not rank 0's: {name!r} is "
                    f"{theirs.get(name, 'missing')} there and {first.get(name, 'missing')} on "
                    "rank 0; build the same model on every rank"
                )
