"""What the collectives of a program have in common.

Each collective node of a lowered program is one object, made once: it knows its unit and the layout
of its parameters, so that a step only allocates, launches and waits. `gather.py` and `reduce.py`
hold the kinds; nothing outside this package moves data between ranks.

On CUDA a collective is launched on the side stream of its group, and `wait` makes the compute
stream wait for it; the host never waits. See README.md for why memory is safe.

Gloo's works run on threads, which refer to what they moved until some time after `wait` returned: a
moment, or as long as the thread is not scheduled. So Gloo is given aliases, and once a work is done
these are pointed at nothing: memory goes back where the program says, not when a thread gets to it.
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
from graphshard.runtime.group import Group
from graphshard.runtime.streams import Launched


@dataclass(frozen=True)
class Operand:
    """A parameter a collective moves, in the dtype it is moved in.

    made: its shard is a cast made for this gather, which keeps it no longer than it must.
    """

    layout: ParamLayout
    dtype: torch.dtype
    made: bool = False

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's padded part."""
        return prod(self.layout.shard_shape) * self.dtype.itemsize


class Pending:
    """A launched collective: the works to wait for and what they read and write.

    launched: where it runs on a side stream, in place of works.
    own: copies for this rank to make between its own tensors, as (to, from).
    lent: the aliases of those tensors that the backend's threads refer to.
    """

    __slots__ = (
        "buffers", "collective", "launched", "lent", "operands", "own", "packed", "works"
    )  # fmt: skip

    def __init__(
        self, collective: Collective, operands: list[Tensor], buffers: list[Tensor]
    ) -> None:
        self.collective = collective
        self.operands = operands
        self.buffers = buffers
        self.packed: list[Tensor] = []
        self.own: list[tuple[Tensor, Tensor]] = []
        self.works: list[Any] = []
        self.launched: Launched | None = None  # the last of its launches
        self.lent: list[Tensor] = []

    def __del__(self) -> None:
        if self.launched is not None:
            self.launched.drop()
        peers = self.collective.group.peers
        if self.works and peers is not None:  # of a forward, say, whose backward never came
            peers.drop(self.works)


def wait(pending: Pending) -> list[Tensor]:
    """Finish `pending`: its results in operand order."""
    return pending.collective.wait(pending)


# fx prints a call by it: graphshard_wait(...).
wait.__module__ = "graphshard"


class Collective:
    """A collective of one node; subclasses say what is launched and what comes out."""

    op = ""

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        self.group = group
        self.unit = unit
        self.phase = phase
        self.operands = tuple(operands)
        # fx prints a call by these.
        self.__name__ = self.__qualname__ = self.op
        self.__module__ = unit.replace(".", "_") or "root"

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Start the collective on `tensors`, in operand order."""
        raise NotImplementedError

    def start(self, pending: Pending, launch: Callable[..., Any], *args: Any) -> None:
        """Add the work of `launch(*args)`, a call of the process group, to `pending`.

        Raises:
            CollectiveError: it failed.
        """
        if self.group.backend == "gloo":
            args = tuple(_lent(value, pending.lent) for value in args)
        side_stream = self.group.side_stream
        try:
            if side_stream is None:
                pending.works.append(launch(*args))
            else:
                pending.launched = side_stream.launch(_queued, launch, args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.failed(
                "could not be started",
                "if this says nothing of this rank, look for the first error in the logs of all "
                "ranks",
                error,
            ) from error

    def exchange(
        self,
        pending: Pending,
        sent: Sequence[Sequence[Tensor]],
        received: Sequence[Sequence[Tensor]],
    ) -> None:
        """Add the works of an exchange with the peers to `pending`; see
        `PairwiseExchange.exchange`.

        Raises:
            CollectiveError: another rank died, failed or timed out.
        """
        assert self.group.peers is not None
        try:
            pending.works += self.group.peers.exchange(sent, received)
        except RuntimeError as error:
            raise self.left_alone(error) from error

    def wait(self, pending: Pending) -> list[Tensor]:
        """Wait for what `__call__` launched and return the results in operand order.

        Raises:
            CollectiveError: another rank died, failed or timed out.
        """
        for to, own in pending.own:
            to.copy_(own)
        if pending.launched is not None:
            pending.launched.join()
            pending.launched = None
        works, pending.works = pending.works, []
        try:
            for work in works:
                work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.left_alone(error) from error
        for alias in pending.lent:
            alias.set_()  # type: ignore[call-overload]
        return self.results(pending)

    def left_alone(self, error: Exception) -> CollectiveError:
        """The error to raise when another rank did not do its part."""
        return self.failed(
            "failed",
            "another rank died, raised an error, or did not get here within "
            f"{self.group.timeout.total_seconds():g} s; look for the first error in the logs "
            "of all ranks",
            error,
        )

    def results(self, pending: Pending) -> list[Tensor]:
        """What a finished collective yields."""
        raise NotImplementedError

    def message(self, *indices: int) -> Message:
        """The operands `indices`, moved together."""
        numels = [prod(self.operands[i].layout.shard_shape) for i in indices]
        return Message(indices, numels, sum(numels), packed=len(indices) > 1)

    def messages(self, pack_below: int, size: Callable[[Operand], int]) -> list[list[Message]]:
        """Messages of each launch: one launch per dtype, in it one message per large operand and
        one for all below `pack_below` bytes.
        """
        dtypes = [operand.dtype for operand in self.operands]
        small = packed([size(operand) for operand in self.operands], dtypes, pack_below)
        together = {i for indices in small for i in indices}
        launches = []
        for dtype in sorted(set(dtypes), key=str):
            alone = [i for i, d in enumerate(dtypes) if d is dtype and i not in together]
            large = [self.message(i) for i in alone]
            launches.append(large + [self.message(*i) for i in small if dtypes[i[0]] is dtype])
        return launches

    def failed(self, how: str, advice: str, error: Exception) -> CollectiveError:
        """The error to raise when the collective failed with `error`."""
        return CollectiveError(
            f"{self.op} of unit {self.unit or '(root)'} in {self.phase} {how} on rank "
            f"{self.group.rank} of {self.group.size}: {advice} ({error})"
        )


def _queued(launch: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Queue a collective on the current stream.

    Its options say so (`asyncOp`); of a backend that uses a stream of its own all the same, the
    current one waits here.
    """
    work = launch(*args)
    if work is not None:
        work.wait()


def _lent(value: Any, lent: list[Tensor]) -> Any:
    """An alias of the tensor `value`, of each in a list of them, added to `lent`; else `value`."""
    if isinstance(value, Tensor):
        lent.append(value.detach())
        return lent[-1]
    return [_lent(item, lent) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Message:
    """Operands that travel together.

    numels: the elements of each one's shard; `numel` is their sum.
    """

    indices: tuple[int, ...]
    numels: list[int]
    numel: int
    packed: bool  # copied together, rather than one tensor read where it lies
