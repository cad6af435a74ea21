"""`torch.amp.GradScaler` on shards: an infinity in one rank's part makes all ranks skip the step.

The scaler looks for infinities in all gradients of an optimizer in one call. For DTensors torch
then takes the maximum of what the ranks found, but over the dimensions in which the first gradient
of the list is sharded: with a replicated one first (a parameter without dimensions) the ranks would
disagree, step apart, and never come together again. And it refuses lists in which plain tensors
(ignored parameters) stand beside DTensors; theirs are each rank's own, so what is found in them has
to reach every rank of the mesh, over dimensions too in which nothing is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import private
from graphshard.torch_private.patches import patched_for_good, replace_dtensor_handler


@cache
def let_scales_arrive() -> None:
    """Make a scaler's copies of its scale on the host complete before it reads them.

    torch copies the scale to each gradient's device without waiting for the copy, which on the host
    is read at once: gradients of offloaded parameters would be multiplied by what lay there before.
    A fused optimizer does the same with the scale, and with whether there are infinities, which it
    subtracts from its counts of steps.
    """
    replicator = private("torch.amp.grad_scaler", "_MultiDeviceReplicator")
    get = replicator.get

    def complete(self: Any, device: torch.device) -> Tensor:
        copied: Tensor = get(self, device)
        if copied.device.type == "cpu" and self.master.is_cuda:
            torch.cuda.current_stream(self.master.device).synchronize()
        return copied

    patched_for_good(replicator, "get", complete)
    register_optimizer_step_pre_hook(_bring_to_host)


def _bring_to_host(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Copy what a scaler gave a fused `optimizer` to the host, if a parameter lies there."""
    for name in ("grad_scale", "found_inf"):
        value = getattr(optimizer, name, None)
        if isinstance(value, Tensor) and value.is_cuda and _is_offloaded(optimizer):
            setattr(optimizer, name, value.cpu())


def _is_offloaded(optimizer: Optimizer) -> bool:
    params = (param for group in optimizer.param_groups for param in group["params"])
    local = (param.to_local() if isinstance(param, DTensor) else param for param in params)
    return any(param.device.type == "cpu" for param in local)


@cache
def let_scalers_agree() -> None:
    """Replace the search for infinities in DTensors in this process, once."""
    replace_dtensor_handler(torch_compat.find_infinities(), _find_infinities)


def _find_infinities(
    torch_handler: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`op(grads, found, inverse_scale)` with `found` the maximum over all ranks and gradients."""
    grads: list[Tensor] = args[0]
    plain = [grad for grad in grads if not isinstance(grad, DTensor)]
    if plain:
        op(plain, *args[1:], **kwargs)
    by_mesh: dict[Any, list[DTensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            by_mesh.setdefault(grad.device_mesh, []).append(grad)
    for mesh, dtensors in by_mesh.items():
        if any(grad.to_local().device.type != mesh.device_type for grad in dtensors):
            _find_in_offloaded(op, mesh, dtensors, args, kwargs)
            continue
        # Those sharded over the most dimensions first, since only the first one counts.
        dtensors.sort(key=lambda grad: sum(isinstance(p, Replicate) for p in grad.placements))
        torch_handler(op, (dtensors, *args[1:]), kwargs)
        first = dtensors[0]
        for dim, placement in enumerate(first.placements):
            # Of replicated gradients alike on all ranks; whether plain ones are among those of
            # another rank this one cannot know.
            if placement.is_replicate() and first.device_mesh.size(dim) > 1:
                dist.all_reduce(args[1], dist.ReduceOp.MAX, first.device_mesh.get_group(dim))


def _find_in_offloaded(
    op: Any, mesh: Any, grads: Sequence[DTensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`_find_infinities` in gradients on the host, where the groups of `mesh` may not reduce."""
    op([grad.to_local() for grad in grads], *args[1:], **kwargs)
    found = args[1].to(mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(dim))
    args[1].copy_(found)
