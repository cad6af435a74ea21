"""Clipping gradients by their norm over all parameters and ranks.

The norm is that of one process which holds every gradient whole. Each shard of a gradient counts; a
replicated gradient, equal on its ranks, counts once. Gradients that are not reduced (of ignored
parameters) may differ and count by their mean over the ranks, so that every rank scales its shards
by the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.torch_private import compat as torch_compat


def clip_grad_norm(
    params: Iterable[Tensor],
    unreduced: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    foreach: bool | None,
    groups: Sequence[Any],
    device: torch.device,
) -> Tensor:
    """Scale the gradients in place so that their joint norm is at most `max_norm`.

    Norms are taken in float32 (float64 where gradients are). There is one all_reduce of a number
    for each set of mesh dimensions that gradients are sharded over, none if all are replicated.

    Args:
        params: whose gradients the ranks share.
        unreduced: whose gradients are each rank's own.
        max_norm: the bound.
        norm_type: p of the p-norm, or inf.
        error_if_nonfinite: raise if the norm is no finite number.
        foreach: as for torch's `clip_grad_norm_`.
        groups: the process groups that `unreduced` gradients are averaged over.
        device: where the ranks' numbers are added up.

    Returns:
        The norm before clipping: a plain tensor without dimensions, the same on all ranks.

    Raises:
        PolicyError: `norm_type` is not above 0.
        RuntimeStateError: the norm is not finite, if `error_if_nonfinite`.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise PolicyError(f"norm_type must be above 0, or inf; got {norm_type!r}")
    by_meshes: dict[tuple[Any, ...], list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            by_meshes.setdefault(_sharded_over(param.grad), []).append(_local(param.grad))
    unreduced_grads = [param.grad for param in unreduced if param.grad is not None]
    grads = [grad for each in by_meshes.values() for grad in each] + unreduced_grads
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    norm = _Norm(norm_type, dtype, foreach, device)
    parts = [norm.over(norm.local(each), process_groups) for process_groups, each in
             by_meshes.items()]  # fmt: skip
    if unreduced_grads or groups:
        # Every rank takes part, since any may hold gradients that others do not.
        parts.append(norm.over(norm.local(unreduced_grads), groups, mean=True))
    total = norm.of(torch.stack(parts)) if parts else torch.zeros((), dtype=dtype, device=device)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeStateError(
            f"the {norm_type:g}-norm of the gradients is {total.item()}, so they cannot be "
            "clipped; look for an overflow, or pass error_if_nonfinite=False"
        )
    _scale(grads, (max_norm / (total + 1e-6)).clamp(max=1.0), foreach)
    return total


class _Norm:
    """The p-norm of tensors on this rank, and on the ranks of groups."""

    def __init__(
        self, p: float, dtype: torch.dtype, foreach: bool | None, device: torch.device
    ) -> None:
        self.p = p
        self.dtype = dtype
        self.foreach = foreach
        self.device = device

    def of(self, tensor: Tensor) -> Tensor:
        return torch.linalg.vector_norm(tensor, self.p)

    def local(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of these tensors together, on `device`."""
        norms: list[Tensor] = []
        for alike in _by_device([grad for grad in grads if grad.numel()]):
            if self.foreach is False:
                norms += [torch.linalg.vector_norm(g, self.p, dtype=self.dtype) for g in alike]
            else:
                norms += torch_compat.foreach_norm(alike, self.p, self.dtype)
        if not norms:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        return self.of(torch.stack([n.to(self.device, self.dtype) for n in norms]))

    def over(self, local: Tensor, groups: Sequence[Any], *, mean: bool = False) -> Tensor:
        """The norm of every rank's tensors in `groups`; of their mean power, if `mean`."""
        if not groups:
            return local
        infinite = math.isinf(self.p)
        power = local.clone() if infinite else local**self.p
        for group in groups:
            dist.all_reduce(
                power, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group
            )
            if mean and not infinite:
                power /= dist.get_world_size(group)
        return power if infinite else power ** (1.0 / self.p)


def _sharded_over(grad: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of `grad`."""
    if not isinstance(grad, DTensor):
        return ()
    return tuple(
        grad.device_mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(dim) > 1
    )


def _local(grad: Tensor) -> Tensor:
    return torch_compat.local_tensor(grad) if isinstance(grad, DTensor) else grad


def _by_device(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return by_kind.values()


def _scale(grads: Iterable[Tensor], factor: Tensor, foreach: bool | None) -> None:
    with torch.no_grad():
        for alike in _by_device(grads):
            by = factor.to(alike[0].device)
            if foreach is False:
                for grad in alike:
                    grad.mul_(by)
            else:
                torch_compat.foreach_multiply(alike, by)
