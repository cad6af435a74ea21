"""Frees right behind the last use of what they free."""

from __future__ import annotations

from torch import fx

from graphshard import ops
from graphshard.program import Program
from graphshard.views import alias_inputs


def with_early_frees(program: Program) -> list[fx.Node]:
    """All nodes of `program` in order, each free as early as the uses of what it frees allow."""
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    behind: dict[fx.Node, list[fx.Node]] = {}
    for node in program.nodes():
        if node.target is ops.free:
            wait = node.all_input_nodes[0]
            last = max(_uses(wait), key=place.__getitem__)
            if last.meta["phase"] == node.meta["phase"]:
                behind.setdefault(last, []).append(node)
    moved = {free for frees in behind.values() for free in frees}
    order: list[fx.Node] = []
    for node in program.graph.nodes:
        if node not in moved:
            order += (node, *behind.get(node, ()))
    return order


def _uses(wait: fx.Node) -> list[fx.Node]:
    """Every node that reads what `wait` returned or a view of it; of a collective also its wait."""
    aliases = [user for user in wait.users if ops.is_unpack(user)]
    seen = set(aliases)
    found = [wait, *aliases]
    for value in aliases:  # grows while it is walked
        for user in value.users:
            found.append(user)
            if ops.is_collective(user):
                found += (other for other in user.users if other.target is ops.wait)
            if user not in seen and value in alias_inputs(user):
                seen.add(user)
                aliases.append(user)
    return [node for node in found if node.op == "call_function"]
