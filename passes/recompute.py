"""recompute: what a region computed in forward is computed again in backward, not saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import getitem

import torch
from torch import fx

from graphshard.annotation import CALLS, REGION
from graphshard.errors import PassError
from graphshard.ops import is_random
from graphshard.plan import ShardingPlan
from graphshard.program import BACKWARD, FORWARD, Program
from graphshard.sizes import is_size

_aten = torch.ops.aten


@dataclass(frozen=True)
class Recompute:
    """Recompute the regions the model checkpoints and, with `units`, every unit but the root.

    A region is one call of its module. Before the first backward node of a region that reads one of
    its values, the forward nodes that value comes from are issued again, from the region's inputs,
    which stay saved. Random operators are not issued again: what they drew is saved (of a dropout
    only the mask), so backward sees the same random numbers, and the random stream is eager's.

    The idea is that of "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174) and of
    torch.utils.checkpoint.
    """

    units: bool = False
    name: str = field(default="recompute", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """Edit `program` in place, before parameters are unsharded.

        Raises:
            PassError: a backward node still reads what its region should have recomputed.
        """
        targets = {unit.fqn for unit in plan.units if unit.fqn} if self.units else set()
        reads: dict[Hashable, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        for user in program.nodes(BACKWARD):
            region = _region(user, targets)
            if region is None:
                continue
            for value in user.all_input_nodes:
                if _recomputable(value) and _region(value, targets) == region:
                    reads[region].append((user, value))
        order = {node: index for index, node in enumerate(program.graph.nodes)}
        for region, pairs in reads.items():
            _recompute(program.graph, region, pairs, targets, order)
            _check(pairs, self.name)


def _region(node: fx.Node, targets: set[str]) -> Hashable:
    """The recomputed region `node` belongs to: a checkpointed call, or the innermost target's."""
    if REGION in node.meta:
        return "checkpoint", node.meta[REGION]
    for call in reversed(node.meta.get(CALLS, ())):
        if call[0] in targets:
            return call
    return None


def _recompute(
    graph: fx.Graph,
    region: Hashable,
    pairs: list[tuple[fx.Node, fx.Node]],
    targets: set[str],
    order: dict[fx.Node, int],
) -> None:
    needed: set[fx.Node] = set()
    stack = [value for _, value in pairs]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack.extend(
            source
            for source in _sources(node)
            if _recomputable(source) and _region(source, targets) == region
        )
    again: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(pairs[0][0]):
        for node in sorted(needed, key=order.__getitem__):
            again[node] = _issue_again(graph, node, again)
    for user, value in pairs:
        user.replace_input_with(value, again[value])


def _recomputable(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.meta["phase"] == FORWARD
        and not _keeps_its_draw(node)
        and not is_size(node)  # a number: computing it again could only keep a tensor for it
    )


def _keeps_its_draw(node: fx.Node) -> bool:
    if _dropped(node) is not None:
        return False
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_random(source)
    return is_random(node)


def _dropped(node: fx.Node) -> fx.Node | None:
    """The dropout whose output (not its mask) `node` picks out, if it does."""
    if node.target is getitem and node.args[1] == 0:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is _aten.native_dropout.default:
            return source if source.args[2] is True else None
    return None


def _sources(node: fx.Node) -> list[fx.Node]:
    dropout = _dropped(node)
    return node.all_input_nodes if dropout is None else dropout.all_input_nodes


def _issue_again(graph: fx.Graph, node: fx.Node, again: dict[fx.Node, fx.Node]) -> fx.Node:
    dropout = _dropped(node)
    if dropout is None:
        copy = graph.node_copy(node, lambda source: again.get(source, source))
    else:
        value, p, _ = dropout.args
        assert isinstance(value, fx.Node)
        assert isinstance(p, float | int)
        # A dropout's output is its input times mask times scale, which is what its backward
        # computes of a gradient; so the mask alone, one byte an element, is kept.
        mask = _mask(graph, dropout)
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        copy = graph.call_function(
            _aten.native_dropout_backward.default, (again.get(value, value), mask, scale)
        )
    copy.meta = {**node.meta, "phase": BACKWARD}
    return copy


def _mask(graph: fx.Graph, dropout: fx.Node) -> fx.Node:
    for user in dropout.users:
        if user.target is getitem and user.args[1] == 1:
            return user
    with graph.inserting_after(dropout):
        mask = graph.call_function(getitem, (dropout, 1))
    mask.meta = {**dropout.meta, "val": dropout.meta["val"][1]}
    return mask


def _check(pairs: list[tuple[fx.Node, fx.Node]], name: str) -> None:
    for user, value in pairs:
        if value in user.all_input_nodes:
            raise PassError(f"pass {name}: {user.name} still reads {value.name} from forward")
