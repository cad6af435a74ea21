"""A pool of memory that NCCL has registered, for the buffers that collectives write and send.

The first call of a new sequence of collectives takes what it needs from the pool, which is not
registered meanwhile, and the second registers all of it. So every rank registers at the same call,
segments of the same sizes, as symmetric windows demand. See README.md.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from graphshard.errors import PolicyError
from graphshard.program.program import Program
from graphshard.runtime.graph_lifetimes import keep_track_of
from graphshard.runtime.group import Group
from graphshard.torch_private.collective_pool import RegisteredPool, why_no_pool

logger = logging.getLogger("graphshard")

IDLE_SECONDS = 5.0
"""How long collectives may take to end before a pool is deregistered all the same."""


def pool_of(group: Group, kind: str) -> RegisteredMemory | None:
    """The pool for the ranks that `group` shards over; None for "default", or on a single rank.

    Args:
        group: all ranks.
        kind: the policy's `collective_memory`.

    Raises:
        PolicyError: there can be none here.
    """
    if kind == "default":
        return None
    if reason := why_impossible(group, kind):
        raise PolicyError(
            f"collective_memory={kind!r} is impossible: {reason}; leave the field out"
        )
    return RegisteredMemory(group.shard, kind) if group.shard.size > 1 else None


def why_impossible(group: Group, kind: str) -> str:
    """Why there can be no pool of this `kind` for the ranks of `group`; "" if there can."""
    if group.device.type != "cuda" or (group.size > 1 and "nccl" not in group.shard.backend):
        return f"it is NCCL's memory on GPUs, and this module runs on {group.runs_on}"
    return why_no_pool(kind)


class RegisteredMemory:
    """The pool, and when it is registered.

    group: the ranks that register it.

    Args:
        group: the ranks that parameters are sharded over.
        kind: "nccl" or "symmetric".
    """

    def __init__(self, group: Group, kind: str) -> None:
        self.group = replace(group, memory=None, subgroups={})  # which does not refer back
        self._known: set[int] = set()  # sequences of collectives
        self._waits = False  # for the next call, which registers
        self._registered = False
        self._ended = False
        self._pool: Any = RegisteredPool(
            group.process_group, group.device, symmetric=kind == "symmetric"
        )

    def use(self) -> AbstractContextManager[Any]:
        """A context in which this thread allocates from the pool."""
        context: AbstractContextManager[Any] = self._pool.use()
        return context

    def begin(self, sequence: int, program: Program) -> None:
        """Prepare for a call of `program`, which all ranks are known to begin.

        The host waits for the device, but only in the first two calls of a sequence.

        Args:
            sequence: the number of its sequence of collectives, equal on all ranks.
            program: says how much of the pool it uses; gets a note if that is not registered.
        """
        if sequence not in self._known:
            self._known.add(sequence)
            self._deregister()
            self._waits = True
            self._reserve(program)
        elif self._waits:
            self._waits = False
            reason = self._register()
            assert program.collective_memory is not None
            program.collective_memory = replace(program.collective_memory, why_not=reason)
            if reason:
                logger.warning("graphshard goes on without registered memory: %s", reason)

    def _reserve(self, program: Program) -> None:
        """Make the pool as large as the plan says, in one segment."""
        assert program.collective_memory is not None
        needed = program.collective_memory.bytes
        if needed > sum(self._pool.segments()):
            with self.use():
                torch.empty(needed, dtype=torch.uint8, device=self.group.device)

    def _register(self) -> str:
        """Register what the pool holds, on all ranks or on none; "" if it did, or why not."""
        sizes = self._pool.segments()
        told = self.group.gather_ints([self._ended, len(sizes), sum(sizes)])
        if any(ended for ended, *_ in told):
            return "the communicator was ended, or is about to be, on some rank"
        if any(theirs[1:] != told[0][1:] for theirs in told):
            return "pools of ranks differ: " + ", ".join(
                f"rank {rank} has {size:,} bytes in {count} segments"
                for rank, (_, count, size) in enumerate(told)
            )
        failure: Exception | None = None
        try:
            self._pool.register()
        except (RuntimeError, TypeError) as error:
            failure = error
        self._registered = failure is None
        bad = self.group.gather_ints([not self._registered])
        failed = [rank for rank, flags in enumerate(bad) if any(flags)]
        if not failed:
            keep_track_of(self)
            return ""
        self._deregister()
        names = ", ".join(map(str, failed))
        return f"NCCL did not register it on rank {names}" + (f": {failure}" if failure else "")

    def _deregister(self) -> None:
        if self._registered:
            if self.group.side_stream is not None:
                self.group.side_stream.synchronize()
            self._pool.deregister()
            self._registered = False

    def release(self) -> None:
        """Deregister the pool for good, since its communicator is about to end.

        Collectives that never end are not waited for.
        """
        self._ended = True
        if not self._registered:
            return
        stream, self._registered = self.group.side_stream, False
        deadline = time.monotonic() + IDLE_SECONDS
        try:
            while stream is not None and not stream.is_idle() and time.monotonic() < deadline:
                time.sleep(0.01)
            self._pool.deregister()
        except RuntimeError as error:
            logger.warning("graphshard could not deregister memory of collectives: %s", error)

    def __del__(self) -> None:
        self.release()
