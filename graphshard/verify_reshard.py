"""Rule on partial reshard: what small groups of ranks keep of a parameter, and who gathers it."""

from __future__ import annotations

from torch import fx

from graphshard import ops
from graphshard.verify_facts import Facts, signature


def check_reshards(facts: Facts) -> None:
    """A `reshard` takes a full parameter of its unit and is read by gathers of its group only."""
    for node in facts.nodes:
        if node.op != "call_function" or node.target is not ops.reshard:
            continue
        unit, name, ranks = (node.kwargs.get(key) for key in ("unit", "param", "ranks"))
        full = node.args[0] if len(node.args) == 1 else None
        if not isinstance(full, fx.Node) or name not in facts.params:
            facts.fail("operands", node, "a reshard takes one tensor, and says unit and param")
        if facts.plan.unit_of_param(str(name)) != unit:
            facts.fail("operands", node, f"{name!r} is not a parameter of unit {unit!r}")
        asked = facts.plan.unit(str(unit)).options.reshard_ranks
        if ranks != asked:
            facts.fail(
                "reshards", node, f"it keeps parts for groups of {ranks} ranks; the plan: {asked}"
            )
        if not _is_full(full, str(name)):
            facts.fail("reshards", node, f"%{full.name} is not the full value of {name!r}")
        dtype = full.meta["val"].dtype
        expected = (facts.plan.layouts[str(name)].over(int(ranks)).shard_shape, dtype)  # type: ignore
        if signature(node.meta["val"]) != expected:
            found = signature(node.meta["val"])
            facts.fail("shapes", node, f"it is {found}, and must be {expected}")
        for user in node.users:
            if user.target is not ops.all_gather or ops.group_of(user) != ops.RESHARD:
                facts.fail(
                    "reshards", user, f"it reads %{node.name}, a part kept for a gather, whole"
                )


def _is_full(node: fx.Node, name: str) -> bool:
    """Whether `node` is the parameter `name` as a gather of its shards returned it."""
    if not ops.is_unpack(node):
        return False
    gather = ops.collective_of(node)
    params: tuple[str, ...] = gather.kwargs["params"]  # type: ignore[assignment]
    index: int = node.args[1]  # type: ignore[assignment]
    return gather.target is ops.all_gather and params[index] == name
