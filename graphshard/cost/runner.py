"""What runs a plan, where that differs from this library's own runtime."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from graphshard.errors import CostError

RUNTIMES = ("graphshard", "fsdp2")
"""The runtimes that an estimate can be of."""


@dataclass(frozen=True)
class Runner:
    """The runtime that an estimate is of.

    Args:
        runtime: "graphshard", whose gathers write each parameter in place, or "fsdp2", torch's
            `fully_shard`, which gathers into one buffer and copies each parameter out of it.
        leave_eager: FQNs of units whose compute is not compiled although the program has regions;
            "" is the root. Models that are compiled block by block leave the root, with its norm,
            head and loss, eager.

    Raises:
        CostError: the runtime is unknown, or `leave_eager` is a text.
    """

    runtime: str = "graphshard"
    leave_eager: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise CostError(f"runtime must be one of {', '.join(RUNTIMES)}; got {self.runtime!r}")

    @classmethod
    def of(cls, runtime: str, leave_eager: Collection[str]) -> Runner:
        """The runner of the arguments of `graphshard.simulate`."""
        if isinstance(leave_eager, str):
            raise CostError(
                f"leave_eager is a list of units; got {leave_eager!r}; write "
                f"leave_eager=[{leave_eager!r}]"
            )
        return cls(runtime, frozenset(leave_eager))

    @property
    def copies_gathers(self) -> bool:
        """Whether each gathered parameter is copied out of the collective's buffer."""
        return self.runtime == "fsdp2"


OWN = Runner()
