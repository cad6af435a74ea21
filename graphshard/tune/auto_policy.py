"""`AutoPolicy`: leave what a policy decides to a search by simulation."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphshard.cost.memory import OPTIMIZERS
from graphshard.errors import PolicyError
from graphshard.format import bytes_in
from graphshard.hardware.hardware import Hardware
from graphshard.policy.base import Policy
from graphshard.policy.fields import is_int
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.recompute import RecomputeChoice

if TYPE_CHECKING:
    from graphshard.progress import Stages
    from graphshard.tune.tuning import Tuning


AUTO = "auto"
"""What a field holds that is to be searched."""


SEARCHED = (
    "units",
    "strategy",
    "reshard_after_forward",
    "reshard_root",
    "backward_prefetch",
    "forward_prefetch",
    "recompute",
    "offload",
    "schedule",
)
"""The fields that may be "auto"."""


@dataclass(frozen=True)
class AutoPolicy:
    """The policy under which a step is fastest, by simulation, in the memory there is.

    `tune` finds it; `graphshard.compile` and `graphshard.plan` do so first where they are given
    this for a policy. What it finds is an ordinary, explicit policy, which prints as code. The same
    model, inputs, mesh and hardware always give the same policy, so all ranks find the same.

    Args:
        memory_budget: the most bytes a rank's device may hold at any point of a step, in all
            (`Estimate.peak_bytes`): a number, or a text such as "70GiB". None: the hardware's
            memory. What the framework, its libraries and fragmentation take besides is not counted,
            so leave room for it.
        hardware: a preset's name, a hardware file, or a `graphshard.Hardware`. None: "h100-sxm", or
            where `compile` runs on the CPU "cpu-gloo".
        gpus_per_node: ranks on a node. None: as the hardware says.
        optimizer: whose states count: "adamw", "adamw-fused", "sgd", "sgd-momentum" or "none".
        mixed_precision: as in a policy. It changes the numbers, so it is never searched.
        units: a policy that chooses the units and says nothing else, to fix them.
        strategy, reshard_after_forward, reshard_root, backward_prefetch, forward_prefetch,
            recompute, offload, schedule: as in a policy, to fix them; "auto" searches each.
        ignored, cuda_graph, sync_module_states, notes: as in a policy.

    Raises:
        PolicyError: a field has a value outside its range.
        CostError: there is no such hardware.
    """

    memory_budget: int | str | None = None
    hardware: Hardware | str | os.PathLike[str] | None = None
    gpus_per_node: int | None = None
    optimizer: str = "adamw"
    mixed_precision: MixedPrecision | None = None
    units: Policy | str = AUTO
    strategy: str = AUTO
    reshard_after_forward: bool | int | str | None = AUTO
    reshard_root: bool | str = AUTO
    backward_prefetch: str | None = AUTO
    forward_prefetch: int | str = AUTO
    recompute: Collection[type | str] | type | str | None = AUTO
    offload: Collection[str] | str | None = AUTO
    schedule: str = AUTO
    ignored: Iterable[nn.Module | Tensor | str] | nn.Module | Tensor | str | None = None
    cuda_graph: bool = False
    sync_module_states: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        budget = self.memory_budget
        if isinstance(budget, str):
            try:
                object.__setattr__(self, "memory_budget", bytes_in(budget))
            except ValueError as error:
                raise PolicyError(f"memory_budget: {error}") from None
            budget = self.memory_budget
        if budget is not None and (not is_int(budget) or budget <= 0):  # type: ignore[operator]
            raise PolicyError(
                "memory_budget must be a positive number of bytes, a text such as "
                f'"70GiB", or None; got {self.memory_budget!r}'
            )
        if self.gpus_per_node is not None and (
            not is_int(self.gpus_per_node) or self.gpus_per_node < 1
        ):
            raise PolicyError(f"gpus_per_node must be 1 rank or more; got {self.gpus_per_node!r}")
        if self.optimizer not in OPTIMIZERS:
            raise PolicyError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {self.optimizer!r}"
            )
        if not is_auto(self.units):
            self._check_units()
        if not is_auto(self.recompute) and RecomputeChoice.of(self.recompute).budget:
            raise PolicyError(
                'recompute="budget" fits a step in what a policy says, and here that is searched; '
                'leave recompute="auto", which tries budgets too'
            )
        Policy(**self.fixed())  # checks each value
        Hardware.load(self.hardware or "h100-sxm")

    def _check_units(self) -> None:
        units = self.units
        if not isinstance(units, Policy):
            raise PolicyError(
                f'units must be a policy that chooses them, or "auto"; got {units!r}; write '
                "units=graphshard.BlockPolicy({Block})"
            )
        chosen = [*units.chosen_options(), *(["notes"] if units.notes else [])]
        if chosen:
            raise PolicyError(
                f"units chooses units and nothing else, but it sets {', '.join(chosen)}; give that "
                "to the AutoPolicy itself"
            )

    def fixed(self) -> dict[str, Any]:
        """The fields of a policy that are not searched, by name."""
        shared = {field.name for field in fields(Policy)}
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own = {k: v for k, v in own.items() if k in shared and not is_auto(v)}
        del own["hardware"]
        own.pop("memory_budget")
        return own

    def budget(self, hardware: Hardware) -> int:
        """The bytes a device of `hardware` may hold."""
        given = self.memory_budget
        return given if isinstance(given, int) else hardware.memory_bytes

    def described(self) -> Hardware:
        """The hardware to simulate."""
        hardware = Hardware.load(self.hardware or "h100-sxm")
        if self.gpus_per_node is not None:
            hardware = hardware.with_(gpus_per_node=self.gpus_per_node)
        return hardware

    def on(self, device: torch.device) -> AutoPolicy:
        """This, for a model that runs on `device`: its hardware is said."""
        if self.hardware is not None or device.type != "cpu":
            return self
        return replace(self, hardware="cpu-gloo")

    def tune(
        self,
        model: nn.Module,
        *,
        example_inputs: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        world_size: int | None = None,
        mesh_shape: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        progress: Stages | None = None,
    ) -> Tuning:
        """Search, with no process group and no memory for parameters.

        Args:
            model: on meta or with real weights; stays as it is.
            example_inputs: positional arguments of a call: real, meta or fake.
            example_kwargs: keyword arguments of that call.
            world_size: number of ranks. None: that of `mesh_shape`.
            mesh_shape: `(ranks,)`, or `(replicas, ranks to shard over)`, for which a HYBRID
                strategy is found. None: `(world_size,)`.
            device: where the model is to run.
            progress: told of each stage. None: a bar on stderr, if that is a terminal.

        Raises:
            PolicyError: nothing that may be chosen fits; says what would. Or there are no example
                inputs, or no number of ranks.
            PlanError, CaptureError: the model cannot be planned or captured.
        """
        from graphshard.tune.tuner import tune

        return tune(
            self,
            model,
            example_inputs,
            example_kwargs,
            world_size=world_size,
            mesh_shape=mesh_shape,
            device=device,
            progress=progress,
        )


def is_auto(value: Any) -> bool:
    """Whether a field is left to the search."""
    return isinstance(value, str) and value == AUTO
