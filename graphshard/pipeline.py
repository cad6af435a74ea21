"""Running passes: in order, timed, each verified, each shown to whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from graphshard.plan import ShardingPlan
from graphshard.program import Program


class Pass(Protocol):
    """A rewrite: a frozen dataclass with a `name`, its arguments as fields, and `apply`."""

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place; it is valid before and after."""
        ...


@dataclass(frozen=True)
class PassTiming:
    """How long one pass and the check after it took, in seconds."""

    name: str
    seconds: float
    verify_seconds: float


Watcher = Callable[[Pass, Program], None]
