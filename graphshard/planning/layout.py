"""graphshard/planning/layout.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch

from graphshard.planning.options import UnitOptions
from graphshard.policy.placement import IGNORED, MAX_PADDING, MIN_BYTES, SHARDED
from graphshard.policy.precision import MixedPrecision

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ParamLayout:
    """How one parameter lies on `world_size` ranks: those it is sharded over.

    placement is "shard" (split along `dim`) or "replicate" (a full copy per rank). Along dim 0 the
    chunks have ceil(d0 / W) rows, the last ones fewer or none, each stored padded to that size;
    any other dim is a multiple of W. `resident`: besides, each rank keeps the whole of it, of
    which its chunk is a part. An ignored parameter has the placement "ignore".
    """

    fqn: str
    names: tuple[str, ...]  # every name of a tied parameter, fqn first
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placement: str
    world_size: int
    dim: int = 0
    resident: bool = False
    precision: MixedPrecision | None = None  # of what is cast; None for what never is

    @property
    def compute_dtype(self) -> torch.dtype:
        """What it is gathered and computed with in."""
        return (self.precision and self.precision.param_dtype) or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What its gradient is reduced in."""
        return (self.precision and self.precision.reduce_dtype) or self.compute_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """What the optimizer finds its gradient in."""
        kept = self.precision is not None and self.precision.keep_low_precision_grads
        return self.reduce_dtype if kept else self.dtype

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return prod(self.shape)

    @property
    def ignored(self) -> bool:
        """Whether it is in no unit: each rank's own, its gradients not reduced."""
        return self.placement == IGNORED

    @property
    def sharded(self) -> bool:
        """Whether ranks hold parts of it."""
        return self.placement == SHARDED

    def enters_as_shard(self, stale: Collection[str]) -> bool:
        """Whether a program gets this rank's part of it, to be gathered, rather than all of it.

        A resident one only if it is among those that are `stale` (see `Program.stale`).
        """
        return self.sharded and (not self.resident or self.fqn in stale)

    @property
    def padded_rows(self) -> int:
        """Size along `dim` of what each rank stores, ceil(d / W)."""
        return -(-self.shape[self.dim] // self.world_size)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape a rank stores, padding included; the same on every rank."""
        if not self.sharded:
            return self.shape
        return (*self.shape[: self.dim], self.padded_rows, *self.shape[self.dim + 1 :])

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """Shape of the buffer a gather fills, one rank's part after the other's along dim 0.

        Split along dim 0 the parameter is its prefix; along another dim it is a copy, in the right
        order, of this buffer.
        """
        if not self.sharded:
            return self.shape
        rows, *rest = self.shard_shape
        return (rows * self.world_size, *rest)

    @property
    def padded_too_much(self) -> bool:
        """Whether it is padded by more than is accepted without saying so (see `placement`)."""
        return (
            self.sharded
            and self.numel * self.dtype.itemsize >= MIN_BYTES
            and self.padding_bytes > MAX_PADDING * self.numel * self.compute_dtype.itemsize
        )

    def over(self, ranks: int) -> ParamLayout:
        """The same parameter, split over so many ranks."""
        return replace(self, world_size=ranks)

    def columns(self, start: int, stop: int) -> ParamLayout:
        """These columns of it, which lie as it does: as a parameter of its own."""
        return replace(self, shape=(*self.shape[:-1], stop - start))

    def rows(self, rank: int) -> tuple[int, int]:
        """The half-open range of `dim` that `rank` owns; may be empty."""
        start = min(rank * self.padded_rows, self.shape[self.dim])
        return start, min(start + self.padded_rows, self.shape[self.dim])

    @property
    def shard_bytes(self) -> int:
        """Bytes a rank stores, padding included."""
        stored = self.gathered_shape if self.resident else self.shard_shape
        return prod(stored) * self.dtype.itemsize

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered buffer, padding included."""
        return prod(self.gathered_shape) * self.compute_dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the gathered buffer."""
        return (prod(self.gathered_shape) - self.numel) * self.compute_dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """Parameters gathered together: a module's, less those of nested units; a tied one once."""

    fqn: str  # "" is the root
    module_class: str
    layouts: tuple[ParamLayout, ...]
    options: UnitOptions = field(default_factory=UnitOptions)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """FQNs of the parameters it manages, in module order."""
        return tuple(layout.fqn for layout in self.layouts)

    @cached_property
    def numel(self) -> int:
        """Elements it manages."""
        return sum(layout.numel for layout in self.layouts)

    @cached_property
    def sharded_bytes(self) -> int:
        """Bytes each rank stores, padding included."""
        return sum(layout.shard_bytes for layout in self.layouts)

    @cached_property
    def unsharded_bytes(self) -> int:
        """Bytes while gathered, padding included."""
        return sum(layout.full_bytes for layout in self.layouts)

    @cached_property
    def padding_bytes(self) -> int:
        """Bytes of padding over all ranks."""
        return sum(layout.padding_bytes for layout in self.layouts)
