"""A model's step, captured once for all choices of units that make the same program."""

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
    """Programs of one call of `model`, by what the units have to do with them.

    Units matter to a captured program only where mixed precision casts what goes into or comes out
    of them. So the step is captured with casts at the root alone, and it is seen which modules get
    inputs that a unit would cast. For units that are none of these, the program is the same: no
    cast would change anything at the first of them, so nothing differs before the second, and so
    on. Units that share which of these they are share a program, too, as a cast leaves less to be
    cast behind it. Those of a precision that casts outputs or is not the same everywhere have one
    of their own.
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
        self._plain: Program | None = None
        self._may_share = True
        self._cast: frozenset[str] = frozenset()  # modules at which a unit would cast
        self._own: dict[Any, Program] = {}

    def of(self, plan: ShardingPlan) -> Program:
        """The captured program for `plan`; not to be edited.

        Raises:
            CaptureError: the step cannot be captured.
        """
        plain = self._shared(plan)
        if plain is None:
            return self._captured(plan, tuple(unit.fqn for unit in plan.units))
        casting = tuple(unit.fqn for unit in plan.units if unit.fqn in self._cast)
        return self._captured(plan, casting) if casting else plain

    def like(self, plan: ShardingPlan) -> Program:
        """A captured program that differs from that of `plan` by casts alone, if there is one."""
        return self._shared(plan) or self.of(plan)

    def _shared(self, plan: ShardingPlan) -> Program | None:
        """The program with casts at the root alone, for a plan that may have it."""
        if not _same_everywhere(plan.precisions):
            return None
        if self._plain is None and self._may_share:
            try:
                self._plain = self._at_the_root(plan.precisions)
            except CaptureError:  # without casts at units it does not run
                self._may_share = False
        return self._plain

    @property
    def count(self) -> int:
        """How many programs were captured."""
        return (self._plain is not None) + len(self._own)

    def _captured(self, plan: ShardingPlan, key: tuple[str, ...]) -> Program:
        if key not in self._own:
            self._own[key] = self._capture(plan.precisions)
        return self._own[key]

    def _at_the_root(self, precisions: Precisions | None) -> Program:
        if precisions is None:
            return self._capture(None)
        seen: set[str] = set()
        precision = precisions.units[""]
        assert precision is not None
        wanted = precision.param_dtype if precision.cast_forward_inputs else None
        with _noting(self.model, wanted, seen):
            program = self._capture(replace(precisions, units={"": precision}))
        self._cast = frozenset(seen - {""})
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
            op_cost(node)  # copies of the program begin with what is known of its nodes
        return program


def _same_everywhere(precisions: Precisions | None) -> bool:
    """Whether units share one precision, which casts no outputs."""
    if precisions is None:
        return True
    kinds = set(precisions.units.values())
    precision = precisions.units.get("")
    return len(kinds) == 1 and precision is not None and precision.output_dtype is None


@contextlib.contextmanager
def _noting(model: nn.Module, wanted: torch.dtype | None, seen: set[str]) -> Iterator[None]:
    """Add to `seen` the modules of `model` whose inputs a cast to `wanted` would change."""
    if wanted is None:
        yield
        return

    def hook(fqn: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (args, kwargs)
            if cast_all(given, wanted) is not given:
                seen.add(fqn)

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
