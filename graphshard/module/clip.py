"""Clipping gradients by their norm over all parameters and ranks.

The norm is that of one process which holds every gradient whole. Each shard of a gradient counts; a
replicated gradient, equal on its ranks, counts once. As in torch's own clipping of DTensors, each
gradient's norm is taken over the ranks before the norm of these norms, so that float32 gradients
are clipped to the bits of `fully_shard`'s. Gradients that are not reduced (of ignored
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


class GradNorm:
    """The joint norm of gradients, of which this rank's part is computed and nothing sent yet.

    Norms are taken in float32 (float64 where gradients are).

    Args:
        params: whose gradients the ranks share.
        unreduced: whose gradients are each rank's own.
        norm_type: p of the p-norm, or inf.
        foreach: as for torch's `clip_grad_norm_`.
        groups: the process groups that `unreduced` gradients are averaged over.
        device: where the ranks' numbers are added up.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        unreduced: Iterable[Tensor],
        norm_type: float,
        *,
        foreach: bool | None,
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.norm_type = float(norm_type)
        if not self.norm_type > 0:
            raise PolicyError(f"norm_type must be above 0, or inf; got {self.norm_type!r}")
        shared = [param.grad for param in params if param.grad is not None]
        own = [param.grad for param in unreduced if param.grad is not None]
        self.shared = len(shared)
        self.grads = [_local(grad) for grad in (*shared, *own)]
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in self.grads) else None
        self._norm = _Norm(self.norm_type, dtype or torch.float32, foreach, device)
        by_meshes: dict[tuple[Any, ...], list[int]] = {}
        for place, grad in enumerate(shared):
            by_meshes.setdefault(_sharded_over(grad), []).append(place)
        self._places = [place for places in by_meshes.values() for place in places]
        self._parts: list[tuple[Tensor, Sequence[Any], bool]] = [
            (self._norm.of_each([self.grads[place] for place in places]), groups_of, False)
            for groups_of, places in by_meshes.items()
        ]
        if own or groups:
            # Every rank takes part, since any may hold gradients that others do not.
            joint = self._norm.of(self._norm.of_each(self.grads[self.shared :]))
            self._parts.append((joint.reshape(1), groups, True))
            self._places.append(self.shared)

    @property
    def text(self) -> str:
        """What must be the same on all ranks."""
        sizes = [dist.get_world_size(g) for _, groups, _ in self._parts for g in groups]
        return f"{self.shared} gradients, sums over {sizes} ranks in {self._norm.dtype}"

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """See `ShardedModule.clip_grad_norm_`."""
        norm = self._norm
        parts = [norm.over(local, groups, mean=mean) for local, groups, mean in self._parts]
        if len(parts) > 1:  # in the order of the gradients, by which sums are rounded
            joined = torch.cat(parts)
            parts = [torch.empty_like(joined).index_copy_(0, self._order(), joined)]
        total = norm.of(parts[0] if parts else norm.of_each(()))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeStateError(
                f"the {self.norm_type:g}-norm of the gradients is {total.item()}, so they cannot "
                "be clipped; look for an overflow, or pass error_if_nonfinite=False"
            )
        _scale(self.grads, (max_norm / (total + 1e-6)).clamp(max=1.0), norm.foreach)
        return total

    def _order(self) -> Tensor:
        return torch.tensor(self._places, device=self._norm.device)


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

    def of_each(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of each of these tensors, `(len(grads),)` on `device`."""
        norms = [torch.zeros((), dtype=self.dtype, device=self.device)] * len(grads)
        by_kind: dict[Any, list[int]] = {}
        for place, grad in enumerate(grads):
            if grad.numel():
                by_kind.setdefault((grad.device, grad.dtype), []).append(place)
        for places in by_kind.values():
            alike = [grads[place] for place in places]
            if self.foreach is False:
                found = [torch.linalg.vector_norm(g, self.p, dtype=self.dtype) for g in alike]
            else:
                found = torch_compat.foreach_norm(alike, self.p, self.dtype)
            for place, norm in zip(places, found, strict=True):
                norms[place] = norm.to(self.device, self.dtype)
        if not norms:
            return torch.zeros(1, dtype=self.dtype, device=self.device)
        return torch.stack(norms)

    def over(self, local: Tensor, groups: Sequence[Any], *, mean: bool = False) -> Tensor:
        """The norms of every rank's tensors in `groups`; of their mean powers, if `mean`."""
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
