"""The sharding plan: which parameters are gathered together, and how each is laid out on ranks.

Pure: nothing here touches a process group, a device or parameter memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from graphshard.errors import PlanError
from graphshard.mixed_precision import MixedPrecision, Precisions
from graphshard.placement import IGNORED, MAX_PADDING, MIN_BYTES, REPLICATED, SHARDED
from graphshard.policy_base import Policy
from graphshard.unit_options import UnitOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphshard.program import Program

__all__ = ["IGNORED", "REPLICATED", "SHARDED", "ParamLayout", "ShardingPlan", "Unit"]


@dataclass(frozen=True)
class ParamLayout:
    """How one parameter lies on `world_size` ranks: those it is sharded over.

    placement is "shard" (split along `dim`) or "replicate" (a full copy per rank). Along dim 0 the
    chunks have ceil(d0 / W) rows, the last ones fewer or none, each stored padded to that size;
    any other dim is a multiple of W. `standing`: besides, each rank keeps the whole of it, of
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
    standing: bool = False
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

        A standing one only if it is among those that are `stale` (see `Program.stale`).
        """
        return self.sharded and (not self.standing or self.fqn in stale)

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
        stored = self.gathered_shape if self.standing else self.shard_shape
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


@dataclass
class ShardingPlan:
    """What was decided: units in module order (the root, "", first), for one policy and mesh.

    `world_size` counts all ranks; a mesh is `(ranks,)` or `(replicas, ranks to shard over)`;
    `backend` is what runs compute: "eager", or "inductor" for compiled regions.
    """

    units: tuple[Unit, ...]
    policy: Policy
    world_size: int
    mesh_shape: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()  # FQNs of the modules of classes the policy recomputes
    program: Program | None = field(default=None, repr=False)
    ignored: tuple[ParamLayout, ...] = ()  # of parameters in no unit, left as they are
    backend: str = "eager"

    @property
    def shard_size(self) -> int:
        """Ranks that a sharded parameter is split over."""
        return self.mesh_shape[-1]

    @property
    def replicas(self) -> int:
        """Groups of `shard_size` ranks; each holds every shard."""
        return self.world_size // self.shard_size

    @cached_property
    def layouts(self) -> Mapping[str, ParamLayout]:
        """Layout of every parameter by FQN; all names of a tied one lead to its one layout."""
        of_units = (layout for unit in self.units for layout in unit.layouts)
        return {name: layout for layout in (*of_units, *self.ignored) for name in layout.names}

    @cached_property
    def _unit_by_fqn(self) -> dict[str, Unit]:
        return {unit.fqn: unit for unit in self.units}

    @cached_property
    def _unit_of_param(self) -> dict[str, str]:
        return {
            name: unit.fqn
            for unit in self.units
            for layout in unit.layouts
            for name in layout.names
        }

    @cached_property
    def stale_after_step(self) -> frozenset[str]:
        """Parameters that ranks keep whole and gather again after each step of an optimizer."""
        return frozenset(
            layout.fqn
            for unit in self.units
            for layout in unit.layouts
            if layout.standing and layout.requires_grad and layout.world_size > 1
        )

    @cached_property
    def precisions(self) -> Precisions | None:
        """What is computed in another dtype than its own; None if nothing is."""
        units = {unit.fqn: unit.options.precision for unit in self.units}
        if not any(units.values()):
            return None
        return Precisions(units, {name: lay.compute_dtype for name, lay in self.layouts.items()})

    def unit(self, fqn: str) -> Unit:
        """The unit named `fqn`.

        Raises:
            PlanError: no unit has that name.
        """
        try:
            return self._unit_by_fqn[fqn]
        except KeyError:
            raise PlanError(
                f"no unit is named {fqn!r}; units: {sorted(self._unit_by_fqn)}"
            ) from None

    def unit_of_param(self, name: str) -> str:
        """FQN of the unit that manages the parameter `name` (any of its names).

        Raises:
            PlanError: the model has no such parameter.
        """
        try:
            return self._unit_of_param[name]
        except KeyError:
            raise PlanError(f"the plan knows no parameter named {name!r}") from None

    def unit_of_module(self, fqn: str) -> str:
        """FQN of the innermost unit around the module `fqn` (itself, if it is one)."""
        current = fqn
        while current and current not in self._unit_by_fqn:
            current = current.rpartition(".")[0]
        return current

    def is_nested(self, inner: str, outer: str) -> bool:
        """Whether unit `inner` is `outer` or lies below it in the module tree."""
        return outer == "" or inner == outer or inner.startswith(outer + ".")

    def to_dict(self, *, units: bool = True) -> dict[str, Any]:
        """The plan as plain data, ready for JSON."""
        from graphshard.inspect.plan_text import plan_dict

        return plan_dict(self, units=units)

    def text(self, *, unfold: bool = False) -> str:
        """The plan as stable plain text; `unfold` gives every unit a line of its own."""
        from graphshard.inspect.plan_text import plan_text

        return plan_text(self, unfold=unfold)

    def table(self, *, unfold: bool = False) -> RenderableType:
        """The same content for a terminal, in colours, to be printed by rich."""
        from graphshard.inspect.plan_text import plan_table

        return plan_table(self, unfold=unfold)

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> RenderableType:
        return self.table()
