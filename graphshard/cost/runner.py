"""What runs a plan, where that differs from this library's own runtime."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from graphshard.cost.fused import is_left_eager
from graphshard.errors import CostError
from graphshard.program.program import Program
from graphshard.program.regions import regions_in

RUNTIMES = ("graphshard", "fsdp2")
"""The runtimes that an estimate can be of."""


@dataclass(frozen=True)
class Runner:
    """The runtime that an estimate is of.

    Args:
        runtime: "graphshard", whose gathers write each parameter in place, or "fsdp2", torch's
            `fully_shard`, which gathers into one buffer and copies each parameter out of it.
        leave_eager: FQNs of units and modules whose compute is not compiled although the program
            has regions; "" is the root unit. Models that are compiled block by block leave the
            root, with its norm, head and loss, eager.
        holds_outputs: whether the training loop holds what a call returned until the next call
            returns, as the variable of `outputs = model(**batch)` does.
    """

    runtime: str = "graphshard"
    leave_eager: frozenset[str] = frozenset()
    holds_outputs: bool = False

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise CostError(f"runtime must be one of {', '.join(RUNTIMES)}; got {self.runtime!r}")

    @classmethod
    def of(cls, runtime: str, leave_eager: Collection[str], holds_outputs: bool) -> Runner:
        """The runner of the arguments of `graphshard.simulate`."""
        if isinstance(leave_eager, str):
            raise CostError(
                f"leave_eager is a list of units and modules; got {leave_eager!r}; write "
                f"leave_eager=[{leave_eager!r}]"
            )
        return cls(runtime, frozenset(leave_eager), holds_outputs)

    def check(self, program: Program) -> None:
        """Check that each name of `leave_eager` keeps a part of `program` from being compiled."""
        if self.leave_eager and program.regions is None:
            raise CostError(
                "leave_eager has no effect where nothing is compiled; leave it out, or plan with "
                'backend="inductor"'
            )
        if self.leave_eager:
            nodes = [node for region in regions_in(program.graph) for node in region.nodes]
            for name in sorted(self.leave_eager):
                if not any(is_left_eager(node, [name]) for node in nodes):
                    raise CostError(
                        f"leave_eager names {name!r}, but nothing that is compiled belongs to a "
                        "unit or module of that name"
                    )

    @property
    def copies_gathers(self) -> bool:
        """Whether each gathered parameter is copied out of the collective's buffer."""
        return self.runtime == "fsdp2"


OWN, FSDP2 = Runner(), Runner("fsdp2")
