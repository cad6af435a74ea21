"""What torch's optimizers and its GradScaler have to know of shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard.errors import RuntimeStateError
from graphshard.module.local_steps import step_locally
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import private
from graphshard.torch_private.patches import (
    dtensor_handlers,
    patched_for_good,
    replace_dtensor_handler,
)

_INSTEAD = "make it of sharded.parameters(), after graphshard.compile"


@dataclass(frozen=True)
class _Origin:
    """The name of an original parameter, and the sharded parameter that was made from it."""

    name: str
    shard: weakref.ref[nn.Parameter]


_origins: Any = WeakTensorKeyDictionary()  # of original parameters
_looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Sharded modules."""


def watch_originals(model: nn.Module, sharded: nn.Module) -> None:
    """Let a step of an optimizer that holds `model`'s parameters instead of `sharded`'s raise.

    The original model stays as it is, so such a step changes nothing that a sharded module computes
    with, and the loss stands still without a word.
    """
    shards = dict(sharded.named_parameters())
    for name, param in model.named_parameters():
        shard = shards.get(name)
        if shard is not None and shard is not param:  # as an ignored one is
            _origins[param] = _Origin(name, weakref.ref(shard))
    _modules.add(sharded)
    _watch_steps()


def _originals(optimizer: Optimizer) -> Iterable[tuple[Tensor, _Origin]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            origin = _origins.get(param)
            if origin is not None and origin.shard() is not None:
                yield param, origin


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    step_locally()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would change nothing, where the shards have the gradients.

    Each optimizer is looked at until it is known to be right. One of an original that has gradients
    of its own, as a reference has, is.
    """
    for module in _modules:
        _require_reduced(optimizer, module)
    if optimizer in _looked_at:
        return
    originals = list(_originals(optimizer))
    if not originals or any(param.grad is not None for param, _ in originals):
        _looked_at.add(optimizer)
        return
    for _, origin in originals:
        shard = origin.shard()
        if shard is not None and shard.grad is not None:
            raise RuntimeStateError(
                f"the optimizer holds {origin.name!r} of the model that was given to "
                "graphshard.compile, and the gradient is the sharded module's, so that this step "
                f"would change nothing; {_INSTEAD}"
            )


def _require_reduced(optimizer: Optimizer, sharded: Any) -> None:
    """Refuse a step without gradients, where `no_sync()` has accumulated those of its shards."""
    state = sharded._graphshard
    accumulated = {fqn for _, fqn in state.bindings.accumulated.tensors}
    if not accumulated:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is not None for param in params):
        return
    ids = set(map(id, params))
    waiting = [
        s.layout.fqn for s in state.shards if s.layout.fqn in accumulated and id(s.param) in ids
    ]
    if waiting:
        raise RuntimeStateError(
            f"this step would change nothing: the gradient of {waiting[0]!r} is accumulated by "
            "no_sync() and not reduced yet; let the last backward before a step be of a forward "
            "outside of no_sync(), also where an epoch ends early, or drop it by "
            "sharded.zero_grad()"
        )


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
    """Replace the search for infinities in DTensors in this process, once.

    An infinity in one rank's part has to make all ranks skip the step. A scaler looks for them in
    all gradients of an optimizer in one call. For DTensors torch then takes the maximum of what the
    ranks found, but over the dimensions in which the first gradient of the list is sharded: with a
    replicated one first (a parameter without dimensions) the ranks would disagree, step apart, and
    never come together again. And it refuses lists in which plain tensors (ignored parameters)
    stand beside DTensors; theirs are each rank's own, so what is found in them has to reach every
    rank of the mesh, over dimensions too in which nothing is sharded.
    """
    op = torch_compat.find_infinities()
    replace_dtensor_handler(op, partial(_find_infinities, dtensor_handlers().get(op)))


def _find_infinities(
    torch_handler: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """`op(grads, found, inverse_scale)` with `found` the maximum over all ranks and gradients."""
    grads: list[Tensor] = [torch.view_as_real(g) if g.is_complex() else g for g in args[0]]
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
