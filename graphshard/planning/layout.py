"""Layouts: how each parameter is split over ranks, and which parameters form a unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy, text_of
from graphshard.policy.placement import IGNORED, SHARDED, Along, cuts_of, split_along
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.strategy import Strategy


@dataclass(frozen=True)
class UnitOptions:
    """The options of one unit.

    reshard: the state of its gathered parameters after forward. True: freed, and gathered again.
    False: kept unsharded. A number of ranks: kept sharded within each group of so many ranks.
    may_stay: it is kept although `reshard` is True if backward begins with the unit.
    """

    strategy: Strategy = Strategy.FULL_SHARD
    reshard: bool | int = True
    precision: MixedPrecision | None = None
    may_stay: bool = False

    @property
    def reshard_ranks(self) -> int | None:
        """Ranks in a group that keeps its parameters sharded after forward; None without groups."""
        return None if isinstance(self.reshard, bool) else self.reshard

    @property
    def text(self) -> str:
        """All options as stable text."""
        return ", ".join(f"{name}={text_of(value)}" for name, value in vars(self).items())

    def difference(self, other: UnitOptions) -> str:
        """The options that differ from those of `other`, as stable text; "" if none does.

        Whether a unit may stay tells something only of units that are freed alike.
        """
        compared = dict(vars(self))
        if self.reshard != other.reshard:
            del compared["may_stay"]
        return ", ".join(
            f"{name}={text_of(value)}"
            for name, value in compared.items()
            if value != getattr(other, name)
        )


def options_of(policy: Policy, unit: str, overrides: Mapping[str, Any]) -> UnitOptions:
    """Return the options of `unit` under `policy`, some of whose fields `overrides` replace.

    The root is kept unsharded between forward and backward, unless `policy.reshard_root` or an
    override for it frees it.
    """
    strategy = Strategy(overrides.get("strategy", policy.strategy))
    if strategy is Strategy.SHARD_OPTIMIZER and policy.offloads("params"):
        raise PolicyError(
            f"unit {unit or '(root)'}: strategy SHARD_OPTIMIZER keeps whole parameters on the "
            'device, and offload="params" keeps them on the host; leave one of them out (with '
            "SHARD_GRAD_OP gradients and optimizer states are sharded as well)"
        )
    reshard: bool | int | None = overrides.get("reshard_after_forward")
    if reshard is None and not unit and not policy.reshard_root:
        reshard = False
    if reshard is None and "strategy" not in overrides:
        reshard = policy.reshard_after_forward
    if reshard and not strategy.frees_after_forward:
        raise PolicyError(
            f"unit {unit or '(root)'}: strategy {strategy.value} keeps parameters after forward, "
            f"and reshard_after_forward={reshard!r} does not; leave one of them out"
        )
    by_default = reshard is None and bool(unit)
    if reshard is None:
        reshard = strategy.frees_after_forward
    precision = overrides.get("mixed_precision", policy.mixed_precision)
    # Where memory is bought with time, each byte is held for as short as it can be.
    saves_memory = policy.memory_budget is not None or policy.recompute is not None
    stays = by_default and policy.backward_prefetch == "pre" and not saves_memory
    return UnitOptions(strategy, reshard, precision, may_stay=stays and reshard is True)


@dataclass(frozen=True)
class ParamLayout:
    """The layout of one parameter on `world_size` ranks, the ranks it is sharded over.

    placement: "shard" (split along `dim`), "replicate" (a full copy per rank) or "ignore".
    dim: what it is split along: a dim in `world_size` parts, or two dims as (dim, parts), whose
        parts ranks have row by row. A dim of size d in p parts is cut as `torch.chunk` cuts: into
        ceil(d / p) each, fewer or none at the end. A rank stores its part, contiguous, at the
        beginning of memory for a full one.
    resident: each rank also keeps the full parameter.
    """

    fqn: str
    names: tuple[str, ...]  # every name of a tied parameter, fqn first
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placement: str
    world_size: int
    dim: Along = 0
    resident: bool = False
    precision: MixedPrecision | None = None  # None for a parameter that is never cast

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype it is gathered and computed with in."""
        return (self.precision and self.precision.param_dtype) or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype its gradient is reduced in."""
        return (self.precision and self.precision.reduce_dtype) or self.compute_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the gradient that the optimizer gets."""
        low_precision = self.precision is not None and self.precision.keep_low_precision_grads
        return self.reduce_dtype if low_precision else self.dtype

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return prod(self.shape)

    @property
    def ignored(self) -> bool:
        """Whether it is in no unit: each rank has its own, and gradients are not reduced."""
        return self.placement == IGNORED

    @property
    def sharded(self) -> bool:
        """Whether it is split over ranks."""
        return self.placement == SHARDED

    def enters_as_shard(self, stale: Collection[str]) -> bool:
        """Whether it enters a program as this rank's shard, to be gathered, and not whole.

        A resident parameter does only if it is `stale` (see `Program.stale`).
        """
        return self.sharded and (not self.resident or self.fqn in stale)

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Each dim that is split, with the number of its parts."""
        return cuts_of(self.dim, self.world_size) if self.sharded else ()

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of a full part, which has the elements that each rank stores."""
        shape = list(self.shape)
        for dim, parts in self.cuts:
            shape[dim] = -(-shape[dim] // parts)
        return tuple(shape)

    @property
    def shard_numel(self) -> int:
        """Elements that each rank stores, padding included."""
        return prod(self.shard_shape)

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape of the buffer a gather fills: the ranks' shards concatenated along dim 0.

        A parameter split along dim 0 is a prefix of this buffer; any other is a reordered copy.
        """
        if not self.sharded:
            return self.shape
        rows, *rest = self.shard_shape
        return (rows * self.world_size, *rest)

    @property
    def is_prefix(self) -> bool:
        """Whether the parameter is a prefix of its gathered buffer."""
        return self.dim == 0

    def over(self, ranks: int) -> ParamLayout:
        """The same parameter split over `ranks` ranks."""
        grid = (
            None
            if isinstance(self.dim, int)
            else split_along(self.shape, self.dtype.itemsize, ranks)
        )
        return replace(self, world_size=ranks, dim=self.dim if grid is None else grid)

    def part(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """The part that `rank` owns: (dim, start, stop) of each split dim; it may be empty."""
        found = []
        for dim, parts in reversed(self.cuts):
            rank, index = divmod(rank, parts)
            size, step = self.shape[dim], self.shard_shape[dim]
            found.append((dim, min(index * step, size), min((index + 1) * step, size)))
        return tuple(reversed(found))

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part that `rank` owns."""
        shape = list(self.shape)
        for dim, start, stop in self.part(rank):
            shape[dim] = stop - start
        return tuple(shape)

    @property
    def shard_bytes(self) -> int:
        """Bytes a rank stores, padding included."""
        stored = self.shard_numel
        if self.resident:
            stored = prod(self.gathered_shape) if self.is_prefix else self.numel + stored
        return stored * self.dtype.itemsize

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
    """Parameters gathered together: a module's without those of nested units, tied ones once."""

    fqn: str  # "" is the root
    module_class: str
    layouts: tuple[ParamLayout, ...]
    options: UnitOptions = field(default_factory=UnitOptions)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """FQNs of its parameters, in module order."""
        return tuple(layout.fqn for layout in self.layouts)

    @cached_property
    def numel(self) -> int:
        """Number of elements of its parameters."""
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
