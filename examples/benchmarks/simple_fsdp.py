"""Fully sharded parameters by DTensor alone, for torch.compile to schedule: SimpleFSDP's method.

After Zhang et al. 2024, "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile"
(arXiv:2411.00284), written from its description. Each parameter is a `DTensor(Shard(0))`; whoever
reads it gets a tensor that was redistributed to every rank, whose gradient is an average over ranks
and is redistributed back to shards. So one traced graph holds gathers and reduces, one per
parameter, and the compiler may merge and move them. The gather stands in a region that is
recomputed in backward, so that gathered parameters are not saved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def shard_simply(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard every parameter of `model`, in place; it is meant to be compiled whole.

    Args:
        model: with real weights, the same on every rank. A parameter of two modules stays one.
        mesh: of one dimension.
        dtype: parameters are gathered, and gradients reduced, in it; None: in their own.
    """
    shards: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        names = [name for name, value in module._parameters.items() if value is not None]
        for name in names:
            whole = module._parameters[name]
            if id(whole) not in shards:
                split = distribute_tensor(whole.detach(), mesh, [Shard(0)])
                shards[id(whole)] = nn.Parameter(split, requires_grad=whole.requires_grad)
            module._parameters[name] = shards[id(whole)]
        if names:
            # A property of the class goes before what nn.Module looks up in `_parameters`.
            getters = {name: property(partial(_read, name=name, dtype=dtype)) for name in names}
            kind = type(module)
            module.__class__ = type(f"Sharded{kind.__name__}", (kind,), getters)


def _read(module: nn.Module, name: str, dtype: torch.dtype | None) -> Tensor:
    shard = module._parameters[name]
    contexts = partial(create_selective_checkpoint_contexts, _recompute)
    return checkpoint(_gathered, shard, dtype, use_reentrant=False, context_fn=contexts)


def _recompute(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _gathered(shard: DTensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and shard.is_floating_point():
        shard = shard.to(dtype)
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
