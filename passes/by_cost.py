"""by_cost: the base class of passes that decide by simulating the step."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.passes.split_ends import SplitEnds
from graphshard.program.pass_protocol import PassLike, RehearsingPass, Stage, stages_of


class ByCost(RehearsingPass):
    """A pass between `SetBudget` and `Overlap` that decides by simulating the finished program."""

    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The later passes before `Overlap` that a finished program needs, or hold more bytes."""
        rest: list[PassLike] = []
        for step in following:
            stages = stages_of(step)
            if Stage.SCHEDULED in stages:
                break
            if stages or isinstance(step, SplitEnds):
                rest.append(step)
        return tuple(rest)
