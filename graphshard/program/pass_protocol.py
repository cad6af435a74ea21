"""A pass and the stages that passes establish; see `graphshard/passes`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Flag, auto
from typing import ClassVar, Protocol

from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program


class Stage(Flag):
    """Facts that hold of a program from some pass on; the checker asks more for each of them."""

    CAPTURED = 0
    """No pass has run."""
    GATHERED = auto()
    """Sharded parameters enter as shards, and only gathers read these."""
    REDUCED = auto()
    """The gradient of each trainable parameter is reduced exactly once, and returned."""
    AVERAGED = auto()
    """Gradients that were reduced within one shard group are averaged over the replicas."""
    CAST = auto()
    """Gathers, reduces, kept gradients and results have the dtypes that the plan says."""
    ACCUMULATED = auto()
    """Micro-batches keep their gradients, or add the kept ones, as far as this program should."""
    OFFLOADED = auto()
    """Parameters lie on the host, and so do the gradients that the step returns."""
    FREED = auto()
    """The result of every gather is freed."""
    RELEASED = auto()
    """Backward releases large parameters early; in FSDP's order the memory budget holds now."""
    SCHEDULED = auto()
    """Communication is placed by cost; a program scheduled so keeps its memory budget now."""


class PassLike(Protocol):
    """Everything that the pipeline asks of a pass: an object with a `name` and an `apply`.

    A pass of one's own may also have the attributes `establishes` and `changes_values` of `Pass`.
    """

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place; it is valid before and after."""
        ...


class Pass(ABC):
    """A rewrite: a frozen dataclass with its arguments as fields, and `apply`.

    A pass must not change the values that the step computes: each one that it returns is compared
    with the captured program's. No field of a pass holds another pass.

    Attributes:
        name: shown in timings, dumps and errors; the class's name in snake_case, unless the class
            says another.
        establishes: the stages that a program has reached once the pass ran.
        changes_values: whether the pass changes values knowingly, say to round or to scale them;
            later passes must then keep the new ones.
    """

    name: ClassVar[str]
    establishes: ClassVar[Stage] = Stage.CAPTURED
    changes_values: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place; it is valid before and after."""


class RehearsingPass(Pass):
    """A pass that decides by trying, on a copy, some of the passes that come after it.

    Whoever runs a row of passes hands over the ones that follow (see `apply_pass`), so that no pass
    holds another one.
    """

    @abstractmethod
    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The passes to try, chosen from `following`: all that come after this one, in order."""

    @abstractmethod
    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        """Edit `program` in place as `apply` does; `rest` are the passes to try on a copy."""

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, as if no pass came after this one; see `apply_before`."""
        self.apply_before(program, plan, ())


def apply_pass(
    step: PassLike, program: Program, plan: ShardingPlan, following: Sequence[PassLike] = ()
) -> None:
    """Apply `step`, and hand it those of the passes `following` it that it rehearses."""
    if isinstance(step, RehearsingPass):
        step.apply_before(program, plan, step.rehearsed(following))
    else:
        step.apply(program, plan)


def apply_passes(passes: Sequence[PassLike], program: Program, plan: ShardingPlan) -> None:
    """Apply `passes` in order, without checks in between."""
    for place, step in enumerate(passes):
        apply_pass(step, program, plan, passes[place + 1 :])


def stages_of(*passes: PassLike) -> Stage:
    """The stages that a program has reached after `passes`."""
    reached = Stage.CAPTURED
    for step in passes:
        reached |= getattr(step, "establishes", Stage.CAPTURED)
    return reached
