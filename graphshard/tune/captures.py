"""Captured programs of one model, shared by all choices of units that give the same program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphshard.capture.casting import cast_all
from graphshard.capture.entry import capture
from graphshard.cost.op_cost import op_cost
from graphshard.errors import CaptureError
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.precision import Precisions
from graphshard.program.program import Program


class Captures:
    """Captured programs of one call of `model`, shared between plans where possible.

    Units change a captured program only through the casts of mixed precision. The step is first
    captured with casts at the root alone, noting the modules whose inputs a unit would cast. Plans
    with the same units among those modules share a program. A precision that casts outputs, or
    differs between units, gets a program per plan. See README.md.

    Args:
        model: on any device.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        device: the device to capture for.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device | str,
    ) -> None:
        self.model, self.args, self.kwargs = model, tuple(args), dict(kwargs)
        self.device = device
        self._shared: Program | None = None  # with casts at the root alone
        self._may_share = True
        self._cast: frozenset[str] = frozenset()  # modules at which a unit would cast
        self._by_units: dict[tuple[str, ...], Program] = {}

    def of(self, plan: ShardingPlan) -> Program:
        """Return the captured program for `plan`; the caller must not edit it."""
        shared = self._shared_program(plan)
        if shared is None:
            return self._of_units(plan, tuple(unit.fqn for unit in plan.units))
        casting = tuple(unit.fqn for unit in plan.units if unit.fqn in self._cast)
        return self._of_units(plan, casting) if casting else shared

    def like(self, plan: ShardingPlan) -> Program:
        """Return a captured program that may differ from that of `plan` by casts alone."""
        return self._shared_program(plan) or self.of(plan)

    def _shared_program(self, plan: ShardingPlan) -> Program | None:
        """The program with casts at the root alone; None if `plan` cannot use it."""
        if not _same_everywhere(plan.precisions):
            return None
        if self._shared is None and self._may_share:
            try:
                self._shared = self._capture_root_casts(plan.precisions)
            except CaptureError:  # the model does not run without casts at units
                self._may_share = False
        return self._shared

    @property
    def count(self) -> int:
        """Number of captured programs."""
        return (self._shared is not None) + len(self._by_units)

    def _of_units(self, plan: ShardingPlan, units: tuple[str, ...]) -> Program:
        if units not in self._by_units:
            self._by_units[units] = self._capture(plan.precisions)
        return self._by_units[units]

    def _capture_root_casts(self, precisions: Precisions | None) -> Program:
        if precisions is None:
            return self._capture(None)
        cast_modules: set[str] = set()
        precision = precisions.units[""]
        assert precision is not None
        dtype = precision.param_dtype if precision.cast_forward_inputs else None
        with _recording_casts(self.model, dtype, cast_modules):
            program = self._capture(replace(precisions, units={"": precision}))
        self._cast = frozenset(cast_modules - {""})
        return program

    def _capture(self, precisions: Precisions | None) -> Program:
        program = capture(
            self.model,
            self.args,
            dict(self.kwargs),
            device=self.device,
            precisions=precisions,
        ).program
        for node in program.nodes():
            op_cost(node)  # copies of the program keep the cached costs of its nodes
        return program


def _same_everywhere(precisions: Precisions | None) -> bool:
    """Whether all units share one precision that casts no outputs."""
    if precisions is None:
        return True
    kinds = set(precisions.units.values())
    precision = precisions.units.get("")
    return len(kinds) == 1 and precision is not None and precision.output_dtype is None


@contextlib.contextmanager
def _recording_casts(
    model: nn.Module, dtype: torch.dtype | None, cast_modules: set[str]
) -> Iterator[None]:
    """Add the FQNs of modules whose inputs a cast to `dtype` would change to `cast_modules`."""
    if dtype is None:
        yield
        return

    def hook(fqn: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = (args, kwargs)
            if cast_all(inputs, dtype) is not inputs:
                cast_modules.add(fqn)

        return before

    handles = [
        module.register_forward_pre_hook(hook(fqn), prepend=True, with_kwargs=True)
        for fqn, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
