"""A captured call: its program, and how arguments and results fit to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphshard.capture.guards import Guards
from graphshard.capture.structure import CALL, Structure, take_apart
from graphshard.program.program import Program

_NO_GUARDS = Guards()


@dataclass(frozen=True)
class Capture:
    """A captured program, and the structures of its inputs and of its result.

    guards: the Python state that it was captured with.
    """

    program: Program
    inputs: Structure
    result: Structure
    guards: Guards = _NO_GUARDS

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, aligned with `program.inputs`."""
        return take_apart((args, kwargs), name=CALL)[0]

    def unflatten_outputs(self, tensors: Sequence[Any]) -> Any:
        """The model's own return value around `tensors`, aligned with `program.outputs`."""
        return self.result.build(tensors)
