"""Ranks compare a program's sequence of collectives before they run it.

On Gloo they compare each time; elsewhere (NCCL) only at a sequence's first use, so ranks that later
diverge between sequences they have all run are not noticed. See README.md.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx
from torch.distributed.distributed_c10d import PrefixStore

from graphshard.errors import CollectiveError, FingerprintError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective, operands_of
from graphshard.runtime.group import Group

_TICKET_DIGITS = 15  # of a hexadecimal digest: 60 bits, which fit an int64


_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Fingerprint:
    """The collectives of a graph, one line of text each, independent of batch sizes."""

    lines: tuple[str, ...]

    @staticmethod
    def of(graph: fx.Graph, plan: ShardingPlan) -> Fingerprint:
        """The fingerprint of the forward or backward `graph` of a program."""
        return Fingerprint(tuple(_collective_lines(graph, plan)))

    @cached_property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the lines."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.lines + other.lines)


def _collective_lines(graph: fx.Graph, plan: ShardingPlan) -> Iterator[str]:
    """Phase, operation, unit and ranks of each collective, with shape and dtype of its operands."""
    for node in graph.nodes:
        if ops.is_collective(node):
            collective = Collective.of(node)
            operands = ", ".join(
                f"{name} {list(plan.layouts[name].shape)} {str(o.meta['val'].dtype)[6:]}"
                + (f" by dim {dim}" if (dim := plan.layouts[name].dim) else "")
                + (f" columns {collective.columns}" if collective.columns is not None else "")
                for name, o in zip(collective.params, operands_of(node), strict=True)
            )
            unit = collective.unit or "(root)"
            ranks = _ranks(collective, plan)
            yield f"{node.meta['phase']} {collective.op.name} of {unit} over {ranks}: {operands}"


def _ranks(collective: Collective, plan: ShardingPlan) -> str:
    group = collective.group
    if group == ops.RESHARD:
        return f"groups of {collective.ranks} ranks"
    sizes = {ops.SHARD: plan.shard_size, ops.REPLICATE: plan.replicas, ops.ALL: plan.world_size}
    dimension = f" along {group!r} of {plan.mesh_shape}" if len(plan.mesh_shape) > 1 else ""
    return f"{sizes[group]} ranks{dimension}"


class Agreement:
    """Compares, for one module, the sequences of collectives that ranks are about to run.

    agreed: digests of the sequences that all ranks have begun together.
    turn: how often forward or backward with collectives began; equal on ranks that agree.

    Args:
        group: the ranks; nothing is compared on a single one.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.agreed: set[str] = set()
        self.turn = 0
        self.module = 0
        self.store: Any = None
        # With the "fake" backend there are no other ranks.
        if group.size > 1 and group.backend != "fake":
            # This module is named by the number of modules that this rank compiled on the group.
            self.module = group.store.add(f"graphshard/modules/{group.rank}", 1)
            self.store = PrefixStore(f"graphshard/{self.module}", group.store)

    def require(self, fingerprint: Fingerprint) -> None:
        """Return once every rank is known to begin the same forward or backward.

        Args:
            fingerprint: of the graph that this rank is about to run.

        Raises:
            FingerprintError: some rank is about to run another one; raised on every rank.
            CollectiveError: a rank did not get here within the group's timeout.
        """
        if self.store is None or not fingerprint.lines:
            return
        if self.group.backend == "gloo":
            agreed = self._tickets_match(fingerprint)
        else:
            agreed = fingerprint.digest in self.agreed
        self.turn += 1
        if not agreed:
            self._compare(fingerprint)
            self.agreed.add(fingerprint.digest)

    def _tickets_match(self, fingerprint: Fingerprint) -> bool:
        """Whether every rank begins the same sequence, by one collective that all programs share.

        A ticket is the module's number and the first digits of the digest.
        """
        digest = int(fingerprint.digest[:_TICKET_DIGITS], 16)
        try:
            tickets = self.group.gather_ints([self.module, digest])
        except RuntimeError as error:
            group = self.group
            first = fingerprint.lines[0].partition(":")[0]
            raise CollectiveError(
                f"rank {group.rank} of {group.size} is about to begin {first!r}, "
                "but another rank died, raised an error, or did not get here within "
                f"{group.timeout.total_seconds():g} s; every rank must call the module, and "
                "backward, equally often; look for the first error in the logs of all ranks "
                f"({error})"
            ) from error
        for other, (module, _) in enumerate(tickets):
            if module != tickets[0][0]:
                raise FingerprintError(
                    "the ranks call different modules: of the modules compiled on these ranks, "
                    f"rank 0 runs number {tickets[0][0]} and rank {other} number {module}; every "
                    "rank must call the same modules, and backward through them, in the same order"
                )
        return all(ticket == tickets[0] for ticket in tickets)

    def _compare(self, fingerprint: Fingerprint) -> None:
        """Publish the sequence in the Store, wait for all others, and compare them."""
        size, rank, turn = self.group.size, self.group.rank, self.turn
        self.store.set(f"{turn}/{rank}/lines", "\n".join(fingerprint.lines))
        self.store.set(f"{turn}/{rank}/digest", fingerprint.digest)
        keys = [f"{turn}/{other}/digest" for other in range(size)]
        deadline = time.monotonic() + self.group.timeout.total_seconds()
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                missing = [r for r in range(size) if not self.store.check([keys[r]])]
                raise CollectiveError(
                    f"rank {rank} is about to run a new program (forward or backward number "
                    f"{turn} of this module), but ranks {missing} did not get there within "
                    f"{self.group.timeout.total_seconds():g} s; every rank must call the module "
                    "equally often, and none may have died"
                )
            time.sleep(_POLL_SECONDS)
        digests = [self.store.get(k).decode() for k in keys]
        for other, digest in enumerate(digests):
            if digest != digests[0]:
                raise FingerprintError(_difference(other, self._lines_of(0), self._lines_of(other)))

    def _lines_of(self, rank: int) -> list[str]:
        return self.store.get(f"{self.turn}/{rank}/lines").decode().split("\n")


def _difference(other: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """The message for rank 0 running the lines `mine` and rank `other` running `theirs`."""
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
        "every rank must run the same model with the same policy, take the same branches and "
        "run backward and no_grad alike (only batch sizes and lengths may differ)"
    )
