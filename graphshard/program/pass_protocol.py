"""The interface of a pass, and the stages that passes establish; see README.md of `passes`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Flag, auto
from typing import ClassVar, Protocol

from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program


class Stage(Flag):
    """Facts about a program that passes establish, and that the checker then requires."""

    CAPTURED = 0
    """No pass has run."""
    GATHERED = auto()
    """Sharded parameters enter as shards, which only gathers read."""
    REDUCED = auto()
    """The gradient of each trainable parameter is reduced exactly once, and returned."""
    AVERAGED = auto()
    """Gradients that were reduced within one shard group are averaged over the replicas."""
    CAST = auto()
    """Gathers, reduces, accumulated gradients and results have the dtypes of the plan."""
    ACCUMULATED = auto()
    """This micro-batch accumulates its gradients, or adds the accumulated ones, where it should."""
    OFFLOADED = auto()
    """Parameters are on the host, and so are the gradients that the step returns."""
    FREED = auto()
    """The result of every gather is freed."""
    RELEASED = auto()
    """Backward releases large parameters early. In FSDP's order the memory budget holds now."""
    SCHEDULED = auto()
    """Communication is placed by cost. A program scheduled by cost keeps its memory budget now."""
    CHECKED = auto()
    """With `check_finite`, a check reads every gradient before its reduce."""


class PassLike(Protocol):
    """The least that the pipeline needs of a pass: a `name` and an `apply`.

    The attributes `establishes` and `changes_values` of `Pass` are optional.
    """

    @property
    def name(self) -> str:
        """Shown in timings, dumps and errors."""
        ...

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place; it is valid before and after."""
        ...


class Pass(ABC):
    """A rewrite of a program: a frozen dataclass with its arguments as fields, and `apply`.

    A pass must preserve the values that the step returns: each is compared with the captured
    program's. No field of a pass holds another pass.

    Attributes:
        name: shown in timings, dumps and errors; the class's name in snake_case, unless the class
            sets another.
        establishes: the stages that a program has reached after the pass.
        changes_values: whether the pass changes values on purpose, for example to round or scale
            them; later passes must then preserve the new values.
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
    """A pass that decides by applying some of the passes after it to a copy of the program.

    `apply_pass` hands it the passes that follow, so that no pass holds another one.
    """

    @abstractmethod
    def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
        """The passes to rehearse, chosen from `following`, which are all later passes in order."""

    @abstractmethod
    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        """Edit `program` in place; `rest` are the passes to rehearse on a copy."""

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, with no passes to rehearse; see `apply_before`."""
        self.apply_before(program, plan, ())


def apply_pass(
    step: PassLike, program: Program, plan: ShardingPlan, following: Sequence[PassLike] = ()
) -> None:
    """Apply `step`; a rehearsing pass also gets the passes it chooses from `following`."""
    if isinstance(step, RehearsingPass):
        step.apply_before(program, plan, step.rehearsed(following))
    else:
        step.apply(program, plan)


def apply_passes(passes: Sequence[PassLike], program: Program, plan: ShardingPlan) -> None:
    """Apply `passes` in order, without verification."""
    for place, step in enumerate(passes):
        apply_pass(step, program, plan, passes[place + 1 :])


def stages_of(*passes: PassLike) -> Stage:
    """The stages that `passes` establish together."""
    reached = Stage.CAPTURED
    for step in passes:
        reached |= getattr(step, "establishes", Stage.CAPTURED)
    return reached
