"""by_cost: the base class of passes that decide by simulating the step."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.program.pass_protocol import PassLike, RehearsingPass, Stage, stages_of


class ByCost(RehearsingPass):
    """A pass between `SetBudget` and `Overlap` that decides by simulating the finished program."""

    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The later passes before `Overlap` that establish a stage, as a finished program needs."""
        rest: list[PassLike] = []
        for step in following:
            stages = stages_of(step)
            if Stage.SCHEDULED in stages:
                break
            if stages:
                rest.append(step)
        return tuple(rest)
