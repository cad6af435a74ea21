"""split_reduces: gradients of a unit that are ready far apart are reduced, or kept, apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.passes.by_cost import Candidate
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_after, unpacks
from graphshard.program.collective import Collective
from graphshard.program.edit import issue_of, take_operands
from graphshard.program.program import BACKWARD, Program
from graphshard.program.storages import bytes_of
from graphshard.schedule.clusters import ComputeTimes, clusters
from graphshard.schedule.evaluate import budget_of


@dataclass(frozen=True)
class SplitReduces(Candidate):
    """Give each group of gradients that are ready together a reduce of its own, at its producer.

    Two gradients are far apart if the compute of other units between them takes as long as the
    reduce of the earlier one, so that it can hide there. So the head's gradient is reduced when
    backward begins and does not wait, whole, for the embedding's, which comes last. The wait stands
    before the next reduce_scatter, and averages over replicas are split alike.

    A gradient that is kept for a later micro-batch instead is added to what is kept where it is
    ready.

    Args:
        apart: seconds of other units' compute that make two gradients far apart. None: see above.
    """

    apart: float | None = None

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: the program has no budget, which says what it is timed on.
        """
        work = ComputeTimes(program, budget_of(program).hardware)
        _keep_at_once(program, work)
        firsts = [node for node in program.nodes(BACKWARD) if _is_first(node)]
        for reduce in firsts:
            (wait,) = reduce.users
            operands: Sequence[fx.Node] = reduce.args[0]  # type: ignore[assignment]
            groups = self._groups(reduce, operands, work)
            for group in groups[:-1]:
                _split(program, wait, [operands[index] for index in group])

    def _groups(
        self, reduce: fx.Node, operands: Sequence[fx.Node], work: ComputeTimes
    ) -> list[list[int]]:
        """Indices of operands, in groups in the order in which they are ready."""
        unit = Collective.of(reduce).unit
        ready = [(work.place[ops.origin(grad)], index) for index, grad in enumerate(operands)]

        def enough(group: Sequence[int]) -> float:
            if self.apart is not None:
                return self.apart
            return work.collective_seconds(
                reduce, sum(bytes_of(operands[i].meta["val"]) for i in group)
            )

        return clusters(sorted(ready), lambda *between: work.outside_unit(unit, *between), enough)


def _is_first(node: fx.Node) -> bool:
    """Whether `node` reduces gradients as backward computes them."""
    return node.target in ops.REDUCES and not any(map(ops.is_reduced, node.args[0]))  # type: ignore[arg-type]


def _split(program: Program, wait: fx.Node, grads: Sequence[fx.Node]) -> None:
    """Reduce `grads`, operands of the reduce that `wait` ends, apart, and where they are ready."""
    old = ops.collective_of(wait)
    now: Sequence[fx.Node] = old.args[0]  # type: ignore[assignment]
    own = take_operands(program, wait, (i for i, grad in enumerate(now) if grad in grads))
    reduce = ops.collective_of(own)
    averaged = _averages_apart(program, own)
    at = max(map(ops.origin, grads))
    for node in issue_of(reduce):
        at.append(node)
        at = node
    if reduce.target is not ops.reduce_scatter:
        return  # what is averaged whole is waited for at the end, as before
    scatters = [n for n in program.nodes(BACKWARD) if n.target is ops.reduce_scatter]
    index = scatters.index(reduce)
    if index:
        (before,) = scatters[index - 1].users
        if before > reduce:
            _move(before, _issued_first(reduce))
    _move(own, _issued_first(scatters[index + 1]), averaged)


def _averages_apart(program: Program, wait: fx.Node) -> list[fx.Node]:
    """Give what `wait` of a reduce returns an average over the replicas of its own, if it has one.

    Returns what launches it.
    """
    further = [node for one in unpacks(wait) for node in (one, *transfers_after(one))]
    averages = {user for node in further for user in node.users if user.target is ops.all_reduce}
    found: list[fx.Node] = []
    for average in sorted(averages):
        (end,) = average.users
        operands: Sequence[fx.Node] = average.args[0]  # type: ignore[assignment]
        take = [index for index, operand in enumerate(operands) if operand in further]
        if len(take) < len(operands):
            average = ops.collective_of(take_operands(program, end, take))
        found.append(average)
    return found


def _issued_first(collective: fx.Node) -> fx.Node:
    return issue_of(collective)[0]


def _move(wait: fx.Node, before: fx.Node, averages: Sequence[fx.Node] | None = None) -> None:
    """Wait for a reduce before the node `before`; what is done with its results follows.

    Gradients on their way to the host arrive where they did.
    """
    picked = unpacks(wait)
    further = {node for one in picked for node in transfers_after(one)}
    if averages is None:
        users = {user for node in (*picked, *further) for user in node.users}
        averages = [user for user in users if user.target is ops.all_reduce]
    late = {node for node in further if node.target is ops.arrive}
    late |= {node for one in late for node in transfers_after(one)}
    for node in (wait, *picked, *sorted(further - late), *sorted(averages)):
        before.prepend(node)


def _keep_at_once(program: Program, work: ComputeTimes) -> None:
    """Keep each whole gradient where it is ready, if other units compute before it is kept."""
    for keep in [node for node in program.nodes(BACKWARD) if node.target is ops.keep]:
        chain = [keep]
        while not ops.is_compute(source := chain[-1].all_input_nodes[0]):
            if not ops.is_transfer(source):
                break
            chain.append(source)
        if not ops.is_compute(source):  # but what a reduce returned: a shard
            continue
        if work.outside_unit(keep.meta["unit"], work.place[source], work.place[keep]):
            for node in chain:
                source.append(node)
