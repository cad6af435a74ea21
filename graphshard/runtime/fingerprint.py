"""Ranks agree on a program's sequence of collectives before they run it.

Ranks that issue different collectives hang or mix up data, so at a program's first use each rank
publishes what it is about to issue through the process group's Store (a collective would itself
hang) and compares. The sequence depends on model, policy and mesh alone: ranks with other batch
sizes agree.

A rank may also be running a program that was agreed on before while another meets a new one at the
same call. It notices while it waits for its first collective: wherever the host waits (Gloo), that
wait is cut in slices, and between slices the Store is asked whether somebody announced a new
program at this call.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch import fx
from torch.distributed.distributed_c10d import PrefixStore

from graphshard import ops
from graphshard.errors import CollectiveError, FingerprintError
from graphshard.plan import ShardingPlan
from graphshard.runtime.group import Group

_SLICE = timedelta(seconds=1)
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Fingerprint:
    """What a graph does between ranks, one line per collective, independent of batch sizes."""

    lines: tuple[str, ...]

    @staticmethod
    def of(graph: fx.Graph, plan: ShardingPlan) -> Fingerprint:
        """The fingerprint of half a program."""
        return Fingerprint(tuple(_collective_lines(graph, plan)))

    @cached_property
    def digest(self) -> str:
        """Equal exactly if the lines are."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.lines + other.lines)


def _collective_lines(graph: fx.Graph, plan: ShardingPlan) -> Iterator[str]:
    for node in graph.nodes:
        if ops.is_collective(node):
            params: Any = node.kwargs["params"]
            operands: Any = node.args[0]
            moved = ", ".join(
                f"{name} {list(plan.layouts[name].shape)} {str(o.meta['val'].dtype)[6:]}"
                for name, o in zip(params, operands, strict=True)
            )
            unit = node.kwargs["unit"] or "(root)"
            name = ops.op_name(node)
            yield f"{node.meta['phase']} {name} of {unit} over {plan.world_size} ranks: {moved}"


class Agreement:
    """What the ranks of `group` agreed on for one module.

    Args:
        group: the ranks; nothing is compared on a single one.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.agreed: set[str] = set()
        self.store: Any = None
        # With the "fake" backend there are no other ranks.
        if group.size > 1 and group.backend != "fake":
            # The number of modules this rank has made on the group, which names this one.
            number = group.store.add(f"graphshard/modules/{group.rank}", 1)
            self.store = PrefixStore(f"graphshard/{number}", group.store)

    def require(self, key: str, fingerprint: Fingerprint) -> None:
        """Return once every rank is known to issue the same at the point `key` of the run.

        Args:
            key: which use of the module this is, the same on every rank.
            fingerprint: of what this rank is about to run.

        Raises:
            FingerprintError: some rank issues others, on every rank alike.
            CollectiveError: a rank did not get here within the group's timeout.
        """
        if self.store is None or not fingerprint.lines:
            return
        if fingerprint.digest not in self.agreed:
            self._compare(key, fingerprint)
            self.agreed.add(fingerprint.digest)
        elif self.group.backend == "gloo":
            self.group.first_wait = lambda works: self._watchful_wait(works, key, fingerprint)

    def _compare(self, key: str, fingerprint: Fingerprint) -> None:
        size, rank = self.group.size, self.group.rank
        self.store.set(f"{key}/{rank}/lines", "\n".join(fingerprint.lines))
        self.store.set(f"{key}/{rank}/digest", fingerprint.digest)
        self.store.set(f"{key}/announced", "1")
        keys = [f"{key}/{other}/digest" for other in range(size)]
        deadline = time.monotonic() + self.group.timeout.total_seconds()
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                missing = [r for r in range(size) if not self.store.check([keys[r]])]
                raise CollectiveError(
                    f"rank {rank} is about to run a new program (use {key} of this module), but "
                    f"ranks {missing} did not get there within "
                    f"{self.group.timeout.total_seconds():g} s; every rank must call the module "
                    "equally often, and none may have died"
                )
            time.sleep(_POLL_SECONDS)
        digests = [self.store.get(k).decode() for k in keys]
        for other, digest in enumerate(digests):
            if digest != digests[0]:
                texts = [self._lines_of(key, r) for r in (0, other)]
                raise FingerprintError(_difference(other, *texts))

    def _lines_of(self, key: str, rank: int) -> list[str]:
        return self.store.get(f"{key}/{rank}/lines").decode().split("\n")

    def _watchful_wait(self, works: list[Any], key: str, fingerprint: Fingerprint) -> None:
        """Wait for `works`, looking up from time to time whether a rank announced a new program."""
        for work in works:
            while True:
                try:
                    work.wait(_SLICE)
                    break
                except RuntimeError:
                    if work.is_completed():  # it failed, or arrived just now
                        work.wait()
                        break
                if self.store.check([f"{key}/announced"]):
                    self._compare(key, fingerprint)


def _difference(other: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Rank 0 runs `mine`, rank `other` runs `theirs`."""
    end = "nothing more"
    longest = max(len(mine), len(theirs))
    for index in range(longest):
        first = mine[index] if index < len(mine) else end
        second = theirs[index] if index < len(theirs) else end
        if first != second:
            break
    return (
        f"the ranks would issue different collectives and hang; they differ first at number "
        f"{index + 1}:\n  rank 0: {first or end}\n  rank {other}: {second or end}\n"
        "every rank must run the same model with the same policy and take the same branches "
        "(only batch sizes and lengths may differ)"
    )
