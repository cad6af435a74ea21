"""The request for a policy: its fields given, or left to the search."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from graphshard.cost.caching_allocator import checked_settings
from graphshard.cost.memory import OPTIMIZERS
from graphshard.cost.reserved import usable_bytes
from graphshard.errors import PolicyError
from graphshard.format import bytes_in
from graphshard.hardware.hardware import Hardware
from graphshard.planning.searched import PolicySearch
from graphshard.policy.base import Policy, require_units_only
from graphshard.policy.fields import Check, check_fields, is_int
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.recompute import RecomputeChoice

AUTO = "auto"
"""The value of a field that is searched."""


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


_CHECKS: dict[str, Check] = {
    "memory_budget": (
        lambda value: value is None or (is_int(value) and value > 0),
        'a positive number of bytes, a text such as "70GiB", or None',
    ),
    "gpus_per_node": (
        lambda value: value is None or (is_int(value) and value >= 1),
        "1 rank or more",
    ),
    "micro_batches": (lambda value: is_int(value) and value >= 1, "1 or more"),
    "seconds": (
        lambda value: value is None or (isinstance(value, int | float) and value > 0),
        "a positive number of seconds, or None",
    ),
    "optimizer": (lambda value: value in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
}


@dataclass(frozen=True)
class PolicyRequest(PolicySearch):
    """The fields of `graphshard.AutoPolicy`, which describes them, checked."""

    memory_budget: int | str | None = None
    hardware: Hardware | str | os.PathLike[str] | None = None
    gpus_per_node: int | None = None
    optimizer: str = "adamw"
    allocator: str = ""
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
    merge_below: int | None = None
    gather_unused: bool = False
    ignored: Iterable[nn.Module | Tensor | str] | nn.Module | Tensor | str | None = None
    cuda_graph: bool = False
    check_finite: str | None = None
    sync_module_states: bool = False
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        budget = self.memory_budget
        if isinstance(budget, str):
            try:
                object.__setattr__(self, "memory_budget", bytes_in(budget))
            except ValueError as error:
                raise PolicyError(f"memory_budget: {error}") from None
        check_fields(self, _CHECKS)
        if not is_auto(self.units):
            self._check_units()
        if not is_auto(self.recompute) and RecomputeChoice.of(self.recompute).budget:
            raise PolicyError(
                'recompute="budget" fits a step in the memory_budget of a policy, which is '
                'searched here; leave recompute="auto", which tries budgets too'
            )
        Policy(**self.fixed())  # checks each value
        Hardware.load(self.hardware or "h100-sxm")
        object.__setattr__(self, "allocator", checked_settings(self.allocator))

    def _check_units(self) -> None:
        units = self.units
        if not isinstance(units, Policy):
            raise PolicyError(
                f'units must be a policy that chooses them, or "auto"; got {units!r}; write '
                "units=graphshard.BlockPolicy({Block})"
            )
        require_units_only(units, "units", "AutoPolicy")

    def fixed(self) -> dict[str, Any]:
        """The fields of a policy that are not searched, by name."""
        names = {field.name for field in fields(Policy)} - {"hardware", "memory_budget"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name in names}
        return {name: value for name, value in values.items() if not is_auto(value)}

    def budget(self, hardware: Hardware, communicators: int = 1) -> int:
        """The bytes that torch may reserve on a device with so many communicators."""
        budget = self.memory_budget
        return budget if isinstance(budget, int) else usable_bytes(hardware, communicators)

    def described(self) -> Hardware:
        """The hardware to simulate."""
        hardware = Hardware.load(self.hardware or "h100-sxm")
        if self.gpus_per_node is not None:
            hardware = hardware.with_(gpus_per_node=self.gpus_per_node)
        return hardware

    def on(self, device: torch.device) -> Self:
        """See `PolicySearch`."""
        if self.hardware is not None or device.type != "cpu":
            return self
        return replace(self, hardware="cpu-gloo")


def is_auto(value: Any) -> bool:
    """Whether the value of a field leaves it to the search."""
    return isinstance(value, str) and value == AUTO
