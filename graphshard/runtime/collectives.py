"""The base of the collectives that a lowered program calls.

Each collective node of a lowered program is one `BoundCollective`, made once: it knows its unit and
the layout of its parameters, so that a step only allocates, launches and waits. `gather.py`
and `reduce.py` hold the subclasses; nothing outside this package moves data between ranks.

On CUDA a collective is launched on the side stream of its group, and `wait` makes the compute
stream wait for it; the host never waits. See README.md for why memory is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from graphshard.errors import CollectiveError
from graphshard.planning.layout import ParamLayout
from graphshard.program.packing import packed
from graphshard.runtime.gloo import alias_tensors, empty_aliases, keep
from graphshard.runtime.group import Group
from graphshard.runtime.streams import Copy, Launched
from graphshard.runtime.whereabouts import At


@dataclass(frozen=True)
class Operand:
    """A parameter that a collective moves, and the dtype in which it is moved.

    temporary: its shard is a cast that only this gather reads, and is dropped at the launch.
    casts: its shard has another dtype, from which the gather itself casts it.
    own: its gradient is read by nothing but this all_reduce, which may overwrite it.
    """

    layout: ParamLayout
    dtype: torch.dtype
    temporary: bool = False
    casts: bool = False
    own: bool = False

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard, padding included."""
        return prod(self.layout.shard_shape) * self.dtype.itemsize


class Pending:
    """A launched collective: the works to wait for, and the tensors they read and write.

    operands: tensors that the works read.
    buffers: tensors that the works write, or that the results are made of.
    packed: buffers of messages that hold several operands.
    copies: copies between this rank's own tensors, as (target, source), made at the wait.
    works: the works of the process group; empty on a side stream.
    launched: the last launch on the side stream; None without one.
    aliases: aliases of the tensors that Gloo's threads refer to.
    pairwise: where works that nobody waits for go.
    arriving: copies of operands from the host, for which the side stream waits.
    """

    __slots__ = (
        "aliases", "arriving", "buffers", "collective", "copies", "launched", "operands", "packed",
        "pairwise", "works",
    )  # fmt: skip

    def __init__(
        self, collective: BoundCollective, operands: list[Tensor], buffers: list[Tensor]
    ) -> None:
        self.collective = collective
        self.operands = operands
        self.buffers = buffers
        self.packed: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.works: list[Any] = []
        self.launched: Launched | None = None
        self.aliases: list[Tensor] = []
        self.arriving: list[Copy] = []
        self.pairwise = collective.group.pairwise  # the group may get another one

    def __del__(self) -> None:
        if self.launched is not None:
            self.launched.drop()
        if self.works and self.pairwise is not None:  # of a forward whose backward never came
            self.pairwise.abandon(self.works)


def wait(pending: Pending) -> list[Tensor]:
    """Wait for `pending` and return its results in operand order."""
    return pending.collective.wait(pending)


# fx prints a call by it: graphshard_wait(...).
wait.__module__ = "graphshard"


class BoundCollective:
    """The collective of one node; subclasses define what is launched and what it returns."""

    op = ""

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        self.group = group
        self.unit = unit
        self.phase = phase
        self.operands = tuple(operands)
        self.here = group.here
        self.is_place(1)
        # fx prints a call by these.
        self.__name__ = self.__qualname__ = self.op
        self.__module__ = unit.replace(".", "_") or "root"

    def is_place(self, number: int) -> None:
        """Take the number of its wait among those of its forward or backward, from 1 on."""
        text = f"{self.op} of {self.unit or '(root)'} in {self.phase}"
        self.at_wait, self.past_wait = At(number, text, True), At(number, text, False)

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Start the collective on `tensors`, one per operand."""
        raise NotImplementedError

    def start(self, pending: Pending, launch: Callable[..., Any], *args: Any) -> None:
        """Call `launch(*args)`, a method of the process group, and add its work to `pending`."""
        if self.here.done and self.here.has_done():
            return
        by_gloo = self.group.backend == "gloo"
        if by_gloo:
            args = tuple(alias_tensors(value, pending.aliases) for value in args)
        side_stream = self.group.side_stream
        try:
            if side_stream is None:
                pending.works.append(launch(*args))
                if by_gloo:
                    keep(pending.works[-1])
            else:
                pending.launched = side_stream.launch(_launch_and_wait, launch, args)
                self.here.launched(self.at_wait, pending.launched.event)
            self.here.begun += 1
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.here.lost = True
            raise self.error(
                "could not be started",
                "if the error is not about this rank, look for the first error in the logs of all "
                "ranks",
                error,
            ) from error

    def exchange(
        self,
        pending: Pending,
        sent: Sequence[Sequence[Tensor]],
        received: Sequence[Sequence[Tensor]],
    ) -> None:
        """Start `PairwiseExchange.exchange(sent, received)` and add its works to `pending`."""
        assert self.group.pairwise is not None
        if self.here.done and self.here.has_done():
            return
        try:
            pending.works += self.group.pairwise.exchange(sent, received)
            self.here.begun += 1
        except RuntimeError as error:
            self.here.lost = True
            raise self.peer_error(error) from error

    def wait(self, pending: Pending) -> list[Tensor]:
        """Wait for the works that `__call__` launched and return the results in operand order."""
        here = self.here
        here.at = self.at_wait
        for target, source in pending.copies:
            target.copy_(source)
        if pending.launched is not None:
            pending.launched.join()
            pending.launched = None
            for copy in pending.arriving:
                copy.settle()
            pending.arriving = []
        works, pending.works = pending.works, []
        try:
            for work in works:
                work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            here.lost = True
            raise self.peer_error(error) from error
        empty_aliases(pending.aliases)
        here.at = self.past_wait
        return self.results(pending)

    def take_part(self, tensors: Sequence[Any]) -> None:
        """Do what other ranks wait for, after an error on this one.

        Poison is sent in the place of operands that are None, which this rank does not have: the
        others get it only if they are told of the error before they use it.
        """
        if self.group.size == 1:
            return
        given = [
            torch.full(
                self.given_shape(o.layout),
                poison_of(o.dtype),
                dtype=o.dtype,
                device=self.group.device,
            )
            if tensor is None
            else tensor
            for tensor, o in zip(tensors, self.operands, strict=True)
        ]
        pending = self(given)
        works, pending.works = pending.works, []
        for work in works:
            work.wait()

    def given_shape(self, layout: ParamLayout) -> tuple[int, ...]:
        """The shape of an operand."""
        return layout.shard_shape

    def peer_error(self, error: Exception) -> CollectiveError:
        """The error to raise when another rank did not take part."""
        return self.error(
            "failed",
            "another rank died, raised an error, or did not get here within "
            f"{self.group.timeout.total_seconds():g} s; look for the first error in the logs "
            f"of all ranks{self.here.others()}",
            error,
        )

    def results(self, pending: Pending) -> list[Tensor]:
        """The results of a finished collective, in operand order."""
        raise NotImplementedError

    def message(self, *indices: int) -> Message:
        """The message that moves the operands `indices`."""
        numels = [prod(self.operands[i].layout.shard_shape) for i in indices]
        return Message(indices, numels, sum(numels), packed=len(indices) > 1)

    def messages(self, pack_below: int) -> list[list[Message]]:
        """The messages of each launch.

        There is one launch per dtype. It has one message for each large operand, and one for all
        operands together of which a shard has fewer bytes than `pack_below`.
        """
        dtypes = [operand.dtype for operand in self.operands]
        small = packed([operand.shard_bytes for operand in self.operands], dtypes, pack_below)
        in_packs = {i for indices in small for i in indices}
        launches = []
        for dtype in sorted(set(dtypes), key=str):
            unpacked = [i for i, d in enumerate(dtypes) if d is dtype and i not in in_packs]
            large = [self.message(i) for i in unpacked]
            launches.append(large + [self.message(*i) for i in small if dtypes[i[0]] is dtype])
        return launches

    def error(self, how: str, advice: str, error: Exception) -> CollectiveError:
        """The error to raise when the collective failed with `error`, whose text ends it."""
        return CollectiveError(
            f"{self.op} of unit {self.unit or '(root)'} in {self.phase} {how} on rank "
            f"{self.group.rank} of {self.group.size}: {advice} ({error})"
        )


def poison_of(dtype: torch.dtype) -> float | int:
    """NaN, True, or the largest integer of `dtype`."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _launch_and_wait(launch: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Queue a collective on the current stream.

    Its options (`asyncOp`) ask for that. Some backends use a stream of their own all the same, and
    `wait` makes the current stream wait for theirs.
    """
    work = launch(*args)
    if work is not None:
        work.wait()


@dataclass(frozen=True)
class Message:
    """One operand, or several that are moved as one tensor.

    indices: their places among the operands of the collective.
    numels: elements of each operand's shard, padding included; `numel` is their sum.
    packed: they are copied into one tensor; otherwise a single operand is read where it lies.
    """

    indices: tuple[int, ...]
    numels: list[int]
    numel: int
    packed: bool
