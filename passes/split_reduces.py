"""split_reduces: reduce gradients of a unit separately if they are ready far apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_after, unpacks
from graphshard.program.collective import Collective, operands_of
from graphshard.program.edit import issue_of, take_operands
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, Program
from graphshard.program.storages import bytes_of
from graphshard.schedule.clusters import ComputeBetween, clusters


@dataclass(frozen=True)
class SplitReduces(Pass):
    """Give each group of gradients that are ready together a reduce of its own, at its producer.

    Two gradients are in different groups if other units compute between them. So the head's
    gradient is reduced when backward begins, and does not stay in memory until the embedding's
    gradient is computed at the end. The wait stands before the next reduce_scatter, and averages
    over replicas are split in the same way. A gradient that is accumulated instead of reduced is
    accumulated where it is ready.

    Args:
        alone: bytes from which gradients are worth a reduce of their own.
    """

    alone: int = 0

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        between = ComputeBetween(program)
        _accumulate_early(program, between)
        firsts = [node for node in program.nodes(BACKWARD) if _is_first(node)]
        for reduce in firsts:
            (wait,) = reduce.users
            operands = operands_of(reduce)
            groups = self._groups(reduce, operands, between)
            for group in groups[:-1]:
                _split(program, wait, [operands[index] for index in group])

    def _groups(
        self, reduce: fx.Node, operands: Sequence[fx.Node], between: ComputeBetween
    ) -> list[list[int]]:
        """Groups of operands, by index, in the order in which they are ready."""
        ready = [(between.place[ops.origin(grad)], index) for index, grad in enumerate(operands)]

        def is_large(group: Sequence[int]) -> bool:
            return sum(bytes_of(operands[i].meta["val"]) for i in group) >= self.alone

        return clusters(sorted(ready), between.others(Collective.of(reduce).unit), is_large)


def _is_first(node: fx.Node) -> bool:
    """Whether `node` is the first reduce of its gradients, which are those of one unit."""
    if node.target not in ops.REDUCES or Collective.of(node).several_units:
        return False
    return not any(map(ops.is_reduced, operands_of(node)))


def _split(program: Program, wait: fx.Node, grads: Sequence[fx.Node]) -> None:
    """Move `grads`, operands of the reduce that `wait` ends, to a reduce where they are ready."""
    collective = ops.collective_of(wait)
    operands = operands_of(collective)
    new_wait = take_operands(program, wait, (i for i, grad in enumerate(operands) if grad in grads))
    reduce = ops.collective_of(new_wait)
    averaged = _split_averages(program, new_wait)
    # A gradient may be known since forward.
    last = max(*map(ops.origin, grads), program.first_backward())
    for node in issue_of(reduce):
        last.append(node)
        last = node
    if reduce.target is not ops.reduce_scatter:
        return  # the wait of an all_reduce stays at the end
    scatters = [n for n in program.nodes(BACKWARD) if n.target is ops.reduce_scatter]
    index = scatters.index(reduce)
    if index:
        (before,) = scatters[index - 1].users
        if before > reduce:
            _move_wait(before, issue_of(reduce)[0])
    _move_wait(new_wait, issue_of(scatters[index + 1])[0], averaged)


def _split_averages(program: Program, wait: fx.Node) -> list[fx.Node]:
    """Split the averages over replicas, so that the results of `wait` have one of their own.

    Returns the all_reduces of these results; none if they are not averaged over replicas.
    """
    results = [node for result in unpacks(wait) for node in (result, *transfers_after(result))]
    averages = {user for node in results for user in node.users if user.target is ops.all_reduce}
    all_reduces: list[fx.Node] = []
    for average in sorted(averages):
        (average_wait,) = average.users
        operands = operands_of(average)
        indices = [index for index, operand in enumerate(operands) if operand in results]
        if len(indices) < len(operands):
            average = ops.collective_of(take_operands(program, average_wait, indices))
        all_reduces.append(average)
    return all_reduces


def _move_wait(wait: fx.Node, before: fx.Node, averages: Sequence[fx.Node] | None = None) -> None:
    """Move the wait of a reduce, and the nodes that process its results, before a node.

    Copies of gradients to the host arrive at the same place as before.
    """
    picked = unpacks(wait)
    followers = {node for result in picked for node in transfers_after(result)}
    if averages is None:
        users = {user for node in (*picked, *followers) for user in node.users}
        averages = [user for user in users if user.target is ops.all_reduce]
    arrivals = {node for node in followers if node.target is ops.arrive}
    arrivals |= {node for result in arrivals for node in transfers_after(result)}
    for node in (wait, *picked, *sorted(followers - arrivals), *sorted(averages)):
        before.prepend(node)


def _accumulate_early(program: Program, between: ComputeBetween) -> None:
    """Move each `accumulate_grad` of a full gradient to its producer.

    It stays where it is if no other unit computes in between.
    """
    for keep in [node for node in program.nodes(BACKWARD) if node.target is ops.accumulate_grad]:
        chain = [keep]
        while not ops.is_compute(source := chain[-1].all_input_nodes[0]):
            if not ops.is_transfer(source):
                break
            chain.append(source)
        if not ops.is_compute(source):  # a shard that a reduce returned
            continue
        others = between.others(keep.meta["unit"])
        if others(between.place[source], between.place[keep]):
            ready = max(source, program.first_backward())
            for node in chain:
                ready.append(node)
