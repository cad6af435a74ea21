"""Rules on the groups of ranks: who joins a collective, averages over replicas, smaller groups."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphshard.program import ops
from graphshard.program.collective import OneTensor, operands_of, param_of, params_of
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import signature
from graphshard.verify.facts import Facts


def check_groups(facts: Facts) -> None:
    """A collective joins a group that the mesh has and that this kind of collective may join."""
    for node in facts.collectives:
        op, group = ops.OPS[node.target], ops.group_of(node)
        allowed = op.groups_with_replicas if facts.plan.has_replicas else op.groups
        if group not in allowed:
            facts.fail(
                "groups",
                node,
                f"this {ops.op_name(node)} joins the ranks {group!r} of a mesh of shape "
                f"{facts.plan.mesh_shape}; it may join {' or '.join(map(repr, sorted(allowed)))}",
            )


def averaged_by(facts: Facts, reduced_by: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
    """By parameter, the all_reduce that averages its reduced shards over the replicas.

    Its operand must be a result of the reduce that `reduced_by` has for the parameter. From
    `Stage.AVERAGED` on, every reduced shard has one, or is kept for a later one.
    """
    averages: dict[str, fx.Node] = {}
    for node in facts.collectives:
        if ops.group_of(node) != ops.REPLICATE:
            continue
        params = params_of(node)
        for name, operand in zip(params, operands_of(node), strict=True):
            if name in averages:
                facts.fail(
                    "replicas", node, f"{name!r} is averaged here and by %{averages[name].name}"
                )
            if not is_reduced_shard(operand, name, reduced_by.get(name)):
                facts.fail("replicas", node, f"%{operand.name} is no reduced shard of {name!r}")
            averages[name] = node
        _check_returned(facts, node, params)
    if facts.plan.has_replicas and Stage.AVERAGED in facts.done:
        _check_all_averaged(facts, reduced_by, averages)
    return averages


def is_reduced_shard(operand: fx.Node, name: str, reduce: fx.Node | None) -> bool:
    """Whether `operand` is the shard of `name` that `reduce` returns, or a transfer of it."""
    operand = ops.origin(operand)
    if reduce is None or not ops.is_unpack(operand) or ops.collective_of(operand) is not reduce:
        return False
    return params_of(reduce)[operand.args[1]] == name  # type: ignore[index]


def _check_returned(facts: Facts, node: fx.Node, params: tuple[str, ...]) -> None:
    operands = operands_of(node)
    shapes = [facts.plan.layouts[name].shard_shape for name in params]
    dtypes = [operand.meta["val"].dtype for operand in operands]
    expected = list(zip(shapes, dtypes, strict=True))
    for wait in facts.waits[node]:
        returned = [signature(val) for val in wait.meta["val"]]
        if returned != expected:
            facts.fail("shapes", wait, f"it returns {returned}; the layouts say {expected}")


def _check_all_averaged(
    facts: Facts, reduced_by: Mapping[str, fx.Node], averages: Mapping[str, fx.Node]
) -> None:
    accumulated = {param_of(node) for node in facts.nodes if node.target is ops.accumulate_grad}
    for name, reduce in reduced_by.items():
        whole = not ops.is_scatter(reduce) and ops.group_of(reduce) == ops.ALL
        if name not in averages and name not in accumulated and not whole:
            facts.fail(
                "replicas",
                reduce,
                f"the gradient of {name!r} is averaged over the {facts.plan.shard_size} ranks of a "
                "replica only",
            )


def check_reshards(facts: Facts) -> None:
    """A `reshard` takes a full parameter of its unit, and only gathers of its group read it."""
    for node in facts.nodes:
        if node.op != "call_function" or node.target is not ops.reshard:
            continue
        part = OneTensor.of(node)
        unit, name, ranks = part.unit, part.param, part.ranks
        full = node.args[0] if len(node.args) == 1 else None
        if not isinstance(full, fx.Node) or name not in facts.params:
            facts.fail("operands", node, "a reshard takes one tensor, and says unit and param")
        if facts.plan.unit_of_param(str(name)) != unit:
            facts.fail("operands", node, f"{name!r} is not a parameter of unit {unit!r}")
        planned = facts.plan.unit(str(unit)).options.reshard_ranks
        if ranks != planned:
            facts.fail(
                "reshards", node, f"it keeps parts for groups of {ranks} ranks; the plan: {planned}"
            )
        if not _is_full(full, str(name)):
            facts.fail("reshards", node, f"%{full.name} is not the full value of {name!r}")
        dtype = full.meta["val"].dtype
        expected = (facts.plan.layouts[str(name)].over(int(ranks)).shard_shape, dtype)  # type: ignore
        if signature(node.meta["val"]) != expected:
            shape = signature(node.meta["val"])
            facts.fail("shapes", node, f"it is {shape}, and must be {expected}")
        for user in node.users:
            if user.target is not ops.all_gather or ops.group_of(user) != ops.RESHARD:
                facts.fail(
                    "reshards", user, f"it reads %{node.name}, a part kept for a gather, whole"
                )


def _is_full(node: fx.Node, name: str) -> bool:
    """Whether `node` is the full parameter `name`, picked from a gather of its shards."""
    if not ops.is_unpack(node):
        return False
    gather = ops.collective_of(node)
    index: int = node.args[1]  # type: ignore[assignment]
    return gather.target is ops.all_gather and params_of(gather)[index] == name
