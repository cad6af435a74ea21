"""The sequence of collectives of a program as text, which ranks compare before they run it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.policy.placement import along_text
from graphshard.program import ops
from graphshard.program.collective import Collective, operands_of
from graphshard.program.finite import values_of
from graphshard.runtime.whereabouts import At

_DIGITS = 15  # of a hexadecimal digest: 60 bits, which fit an int64


@dataclass(frozen=True)
class Call:
    """What a rank is about to do: a text that follows "rank 0", and what else must be alike."""

    text: str
    lines: tuple[str, ...] = ()

    @cached_property
    def number(self) -> int:
        """60 bits of a digest of text and lines."""
        digest = hashlib.sha256("\n".join((self.text, *self.lines)).encode()).hexdigest()
        return int(digest[:_DIGITS], 16)

    @cached_property
    def at(self) -> At:
        """The place where ranks tell each other of it."""
        return At(0, f"the other ranks and {self.text}", True)


@dataclass(frozen=True)
class Fingerprint:
    """The collectives of a graph, one line of text each, independent of batch sizes."""

    lines: tuple[str, ...]

    @staticmethod
    def of(graph: fx.Graph, plan: ShardingPlan) -> Fingerprint:
        """The fingerprint of the forward or backward `graph` of a program."""
        return Fingerprint(tuple(_collective_lines(graph, plan)))

    @cached_property
    def call(self) -> Call:
        """The forward or backward that issues them."""
        return Call(f"is about to begin {self.lines[0].partition(':')[0]!r}", self.lines)

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.lines + other.lines)


def _collective_lines(graph: fx.Graph, plan: ShardingPlan) -> Iterator[str]:
    """Phase, operation, unit and ranks of each collective, with shape and dtype of its operands."""
    for node in graph.nodes:
        if node.target is ops.report_finite:
            checks = len(values_of(node))
            yield f"{node.meta['phase']} report of {checks} checks over {plan.world_size} ranks"
        if ops.is_collective(node):
            collective = Collective.of(node)
            operands = ", ".join(
                f"{name} {list(plan.layouts[name].shape)} {str(o.meta['val'].dtype)[6:]}"
                + (f" by {along_text(dim)}" if (dim := plan.layouts[name].dim) else "")
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


def first_difference(call: str, other: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """The message for rank 0 with the lines `mine` and rank `other` with `theirs`.

    Args:
        call: "calls ..." if the lines are of such a call; "" if they are collectives of a program.
        other: a rank.
        mine: the lines of rank 0.
        theirs: those of `other`, at least one of which differs.
    """
    end = "nothing more"
    for index in range(max(len(mine), len(theirs))):
        first = mine[index] if index < len(mine) else end
        second = theirs[index] if index < len(theirs) else end
        if first != second:
            break
    shown = f"\n  rank 0: {first or end}\n  rank {other}: {second or end}\n"
    if call:
        return (
            f"every rank {call}, but what it works on differs first at number {index + 1}:{shown}"
            "every rank must have the same model, policy and options, and an optimizer that has "
            "stepped equally often"
        )
    return (
        "the ranks would issue different collectives and hang; they differ first at number "
        f"{index + 1}:{shown}every rank must run the same model with the same policy, take the "
        "same branches and run backward and no_grad alike (only batch sizes and lengths may differ)"
    )
