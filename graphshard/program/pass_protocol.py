"""graphshard/program/pass_protocol.py."""

from __future__ import annotations

from typing import Protocol

from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program


class Pass(Protocol):
    """A rewrite: a frozen dataclass with a `name`, its arguments as fields, and `apply`.

    A pass must not change what the step computes: every value it returns is compared with the
    captured program's. One that changes it knowingly, say to round or to scale, has the attribute
    `changes_values = True` (a `ClassVar[bool]`); what it leaves is what later passes must keep.
    """

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place; it is valid before and after."""
        ...
