"""The sharding plan: which parameters are gathered together, and how each is laid out on ranks.

Nothing here touches a process group, a device or parameter memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from graphshard.errors import PlanError
from graphshard.format import human_bytes, mesh_text
from graphshard.planning.layout import ParamLayout, Unit
from graphshard.policy.base import Policy
from graphshard.policy.placement import IGNORED, REPLICATED, SHARDED, along_text
from graphshard.policy.precision import Precisions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphshard.program.program import Program


__all__ = ["IGNORED", "REPLICATED", "SHARDED", "ParamLayout", "ShardingPlan", "Unit"]


@dataclass
class ShardingPlan:
    """The units of a model, in module order (the root, "", first), for one policy and mesh.

    `world_size` counts all ranks; a mesh is `(ranks,)` or `(replicas, ranks to shard over)`;
    `backend` runs compute: "eager", or "inductor" for compiled regions. `replica_all_reduce` names
    the caller's function that averages over replicas in place of the process group; "" if none.
    `process_group_backend` connects the ranks: "nccl", "gloo", or another one's name, as of
    torch.distributed; "none" for a single rank. `runs_on` names it and the kind of device, such
    as "cuda by nccl"; "" if the plan was made without ranks. `hosts` counts the hosts of the ranks;
    ranks that NCCL connects do not count them, and have 1.
    """

    units: tuple[Unit, ...]
    policy: Policy
    world_size: int
    mesh_shape: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()  # FQNs of modules that the policy recomputes by their class
    program: Program | None = field(default=None, repr=False)
    ignored: tuple[ParamLayout, ...] = ()  # parameters in no unit, left unchanged
    backend: str = "eager"
    replica_all_reduce: str = ""
    runs_on: str = ""
    process_group_backend: str = "nccl"
    hosts: int = 1

    @property
    def shard_size(self) -> int:
        """Ranks that a sharded parameter is split over."""
        return self.mesh_shape[-1]

    @property
    def replicas(self) -> int:
        """Number of groups of `shard_size` ranks; each group holds every shard."""
        return self.world_size // self.shard_size

    @property
    def has_replicas(self) -> bool:
        """Whether reduced gradients are averaged over replicas, in the mesh or outside of it."""
        return self.replicas > 1 or bool(self.replica_all_reduce)

    @property
    def grids(self) -> list[tuple[int, ...]]:
        """The shapes of the grids of ranks over which parameters are split along two dims."""
        parts = {tuple(ranks for _, ranks in layout.cuts) for layout in self.layouts.values()}
        return sorted(shape for shape in parts if len(shape) > 1)

    @cached_property
    def layouts(self) -> Mapping[str, ParamLayout]:
        """Layout of every parameter by FQN; all names of a tied parameter map to one layout."""
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
        """FQNs of resident parameters that are gathered again after each step of an optimizer."""
        return frozenset(
            layout.fqn
            for unit in self.units
            for layout in unit.layouts
            if layout.resident and layout.requires_grad and layout.world_size > 1
        )

    @cached_property
    def precisions(self) -> Precisions | None:
        """The precision of each unit and parameter; None if nothing is cast."""
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
        """FQN of the innermost unit around the module `fqn`, or of itself if it is a unit."""
        current = fqn
        while current and current not in self._unit_by_fqn:
            current = current.rpartition(".")[0]
        return current

    def is_nested(self, inner: str, outer: str) -> bool:
        """Whether unit `inner` is `outer` or lies below it in the module tree."""
        return outer == "" or inner == outer or inner.startswith(outer + ".")

    def lines(self) -> list[str]:
        """What must be the same on all ranks, one line of text each; the same in every process."""
        return [
            f"mesh {mesh_text(self.mesh_shape)}",
            *([f"replicas by {self.replica_all_reduce}"] if self.replica_all_reduce else []),
            *(
                f"policy {name}={text}"
                for name, text in self.policy.shared_options().items()
                if name != "notes"
            ),
            *(f"recomputed {fqn}" for fqn in self.recomputed),
            *(
                f"{layout.fqn} of {unit.fqn or '(root)'}: {list(layout.shape)} "
                f"{str(layout.dtype)[6:]}, {layout.placement} by {along_text(layout.dim)}"
                f"{', trained' if layout.requires_grad else ''}"
                + (f", {', '.join(layout.names[1:])} is the same" if layout.names[1:] else "")
                for unit in self.units
                for layout in unit.layouts
            ),
            *(f"unit {unit.fqn or '(root)'}: {unit.options.text}" for unit in self.units),
        ]

    def to_dict(self, *, units: bool = True) -> dict[str, Any]:
        """The plan as plain data, ready for JSON."""
        from graphshard.inspect.plan_text import plan_dict

        return plan_dict(self, units=units)

    def text(self, *, unfold: bool = False) -> str:
        """The plan as stable plain text; `unfold` prints every unit on its own line."""
        from graphshard.inspect.plan_text import plan_text

        return plan_text(self, unfold=unfold)

    def table(self, *, unfold: bool = False) -> RenderableType:
        """The same content as a coloured table for rich to print."""
        from graphshard.inspect.plan_text import plan_table

        return plan_table(self, unfold=unfold)

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> RenderableType:
        return self.table()


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of gradients that a rank holds between the backwards of one step.

    reduced: bytes of every `.grad`, padding included, if each backward reduces.
    accumulated: bytes of the full gradients that backwards inside `no_sync()` accumulate.
    """

    reduced: int
    accumulated: int


def gradient_bytes(plan: ShardingPlan) -> GradientBytes:
    """Return the gradient bytes of `plan`; those of ignored parameters count in full in both."""
    trained = [each for unit in plan.units for each in unit.layouts if each.requires_grad]
    ignored = sum(layout.full_bytes for layout in plan.ignored if layout.requires_grad)
    shards = sum(prod(each.shard_shape) * each.grad_dtype.itemsize for each in trained)
    full = sum(each.numel * each.reduce_dtype.itemsize for each in trained)
    return GradientBytes(reduced=ignored + shards, accumulated=ignored + full)


_PADDING_SHARE, _PADDING_BYTES = 0.01, 2**20
"""The share of what is gathered, and the bytes, above which padding is worth a line."""


def padding_text(plan: ShardingPlan) -> str | None:
    """The padding in what the units gather, in one line; None if it is below 1 %, or 1 MiB."""
    layouts = [layout for unit in plan.units for layout in unit.layouts]
    padding = sum(layout.padding_bytes for layout in layouts)
    gathered = sum(layout.full_bytes for layout in layouts)
    if padding <= max(_PADDING_SHARE * gathered, _PADDING_BYTES):
        return None
    worst = max(layouts, key=lambda layout: layout.padding_bytes)
    return (
        f"{padding / gathered:.1%} of what is gathered ({human_bytes(padding)} of "
        f"{human_bytes(gathered)}), most in {worst.fqn} {list(worst.shape)} over "
        f"{worst.world_size} ranks"
    )
