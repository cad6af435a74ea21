"""Rules on shards and collectives.

Gathers, reduces and transfers, their waits and their order; the groups of ranks that they join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from graphshard.planning.layout import ParamLayout
from graphshard.program import ops
from graphshard.program.collective import (
    Collective,
    OneTensor,
    fault_in,
    operands_of,
    param_of,
    params_of,
)
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import signature
from graphshard.verify.facts import CollectiveKey, Facts, Issued


def check_shards(facts: Facts) -> None:
    """A sharded parameter enters as its shard, which only gathers read."""
    for param in facts.program.params:
        layout = facts.plan.layouts[param.fqn]
        as_shard = layout.enters_as_shard(facts.program.stale)
        expected = (layout.shard_shape if as_shard else layout.shape, layout.dtype)
        if signature(param.node.meta["val"]) != expected:
            facts.fail(
                "shards",
                param.node,
                f"parameter {param.fqn!r} enters as {signature(param.node.meta['val'])}; its "
                f"layout says {expected}",
            )
        if not as_shard:
            continue
        users = list(param.node.users)
        for user in users:  # grows while it is walked
            if ops.is_transfer(user):
                users += user.users
        for user in [user for user in users if not ops.is_transfer(user)]:
            if user.target is not ops.all_gather:
                facts.fail(
                    "shards",
                    user,
                    f"it reads the shard of {param.fqn!r} as if it were the parameter; read what "
                    "a gather returns",
                )


def check_transfers(facts: Facts) -> None:
    """A transfer names its unit and a parameter of that unit; a cast alone changes the dtype.

    A gradient that is added to an accumulated one leaves in the dtype of its reduce. The transfer
    of an activation names None as its parameter.
    """
    for node in facts.nodes:
        if not ops.is_transfer(node):
            continue
        arguments = OneTensor.of(node)
        unit, param, dtype = arguments.unit, arguments.param, arguments.dtype
        source = node.args[0] if len(node.args) == 1 else None
        if not isinstance(source, fx.Node) or fault_in(node) is not None:
            facts.fail("operands", node, "a transfer takes one tensor, and says unit and param")
        if param is not None and (
            param not in facts.params or facts.plan.unit_of_param(param) != unit
        ):
            facts.fail("operands", node, f"{param!r} is not a parameter of unit {unit!r}")
        shape, was = signature(source.meta["val"])
        if node.target is ops.cast:
            was = dtype
        elif node.target is ops.add_accumulated and param is not None:
            was = facts.plan.layouts[str(param)].reduce_dtype
        expected = (shape, was)
        if signature(node.meta["val"]) != expected:
            shape = signature(node.meta["val"])
            facts.fail("shapes", node, f"it is {shape}, and must be {expected}")


def check_gathers(facts: Facts) -> None:
    """A gather takes shards of its own unit, and returns their full parameters in their dtypes.

    A gather within a smaller group takes the parts that `reshard` kept for that group.
    """
    for gather in facts.gathers():
        operands, layouts = _operands(facts, gather)
        for operand, layout in zip(operands, layouts, strict=True):
            if not _is_part(facts, ops.origin(operand), gather, layout.fqn):
                facts.fail("gathers", gather, f"%{operand.name} is not the shard of {layout.fqn!r}")
            if not layout.enters_as_shard(facts.program.stale):
                facts.fail("gathers", gather, f"{layout.fqn!r} is whole on each rank already")
            if layout.resident != Collective.of(gather).in_place:
                facts.fail("gathers", gather, f"{layout.fqn!r} has resident={layout.resident}")
        _check_values(facts, gather, [layout.shape for layout in layouts])


def _is_part(facts: Facts, node: fx.Node, gather: fx.Node, name: str) -> bool:
    """Whether `node` is the part of the parameter `name` that a rank of `gather` has."""
    if ops.group_of(gather) != ops.RESHARD:
        return node is facts.params[name].node
    if node.target is not ops.reshard:
        return False
    part = OneTensor.of(node)
    return (part.param, part.ranks) == (name, Collective.of(gather).ranks)


def check_waits(facts: Facts) -> None:
    """Every collective has one wait, in its own phase, and its results are picked from the wait."""
    for collective in facts.collectives:
        waits = facts.waits[collective]
        name = ops.op_name(collective)
        if not waits:
            facts.fail("waits", collective, f"this {name} is never waited for")
        if len(waits) > 1:
            facts.fail("waits", waits[1], f"%{collective.name} is waited for twice")
        if waits[0].meta["phase"] != collective.meta["phase"]:
            facts.fail(
                "waits",
                waits[0],
                f"%{collective.name} is issued in {collective.meta['phase']} and waited for in "
                f"{waits[0].meta['phase']}; what is under way cannot be kept over the border",
            )
        for user in collective.users:
            if user.target is not ops.wait:
                facts.fail("waits", user, f"it reads %{collective.name} without a wait")
        for user in waits[0].users:
            if user.target is not ops.free and not ops.is_unpack(user):
                facts.fail("waits", user, f"it must pick one result out of %{waits[0].name}")


def check_reduces(facts: Facts) -> None:
    """The gradient of every trainable parameter is reduced exactly once, and then returned."""
    reduced_by: dict[str, fx.Node] = {}
    for reduce in facts.collectives:
        if reduce.target not in ops.REDUCES:
            continue
        operands, layouts = _operands(facts, reduce)
        if ops.group_of(reduce) == ops.REPLICATE:
            continue
        for operand, layout in zip(operands, layouts, strict=True):
            before = reduced_by.get(layout.fqn)
            if before is not None:
                facts.fail(
                    "reduces",
                    reduce,
                    f"the gradient of {layout.fqn!r} is reduced here and by %{before.name}",
                )
            reduced_by[layout.fqn] = reduce
            _check_operand(facts, reduce, operand, layout)
        _check_values(facts, reduce, [layout.shard_shape for layout in layouts])
    for node in facts.nodes:
        if node.target is not ops.accumulate_grad or OneTensor.of(node).accumulated_as != "shard":
            continue
        name, shard = str(param_of(node)), node.args[0]
        assert isinstance(shard, fx.Node)
        if not _is_result(ops.origin(shard), name, reduced_by.get(name)):
            facts.fail("reduces", node, f"%{shard.name} is no reduced shard of {name!r}")
    _check_returned(facts, reduced_by | averaged_by(facts, reduced_by))


def _check_operand(facts: Facts, reduce: fx.Node, operand: fx.Node, layout: ParamLayout) -> None:
    """A reduce takes gradients of its parameters, and is of the kind that their layouts need."""
    if layout.sharded != ops.is_scatter(reduce):
        facts.fail("reduces", reduce, f"{layout.fqn!r} is {layout.placement}ed")
    shape, dtype = signature(operand.meta["val"])
    # A cast may have changed the dtype, and mixed precision computes in another one.
    recast = ops.is_transfer(operand) or layout.precision is not None
    if shape != layout.shape or (dtype != layout.dtype and not recast):
        facts.fail(
            "reduces",
            reduce,
            f"%{operand.name} is {(shape, dtype)}, no gradient of "
            f"{layout.fqn!r} {(layout.shape, layout.dtype)}",
        )


def _check_returned(facts: Facts, reduced_by: dict[str, fx.Node]) -> None:
    grads = facts.program.results().grads
    accumulated = {param_of(node) for node in facts.nodes if node.target is ops.accumulate_grad}
    for param, grad in zip(facts.program.params, grads, strict=True):
        if grad is None and param.fqn in accumulated:
            continue
        if grad is None:
            graded = facts.reference is not None and param.fqn in facts.reference.graded
            if graded or param.fqn in reduced_by:
                facts.fail(
                    "reduces",
                    reduced_by.get(param.fqn, param.node),
                    f"the gradient of {param.fqn!r} is computed but not returned",
                )
            continue
        if not param.requires_grad:
            facts.fail("reduces", grad, f"{param.fqn!r} is frozen, but has a gradient")
        if param.ignored:
            continue
        reduce = reduced_by.get(param.fqn)
        if reduce is None:
            facts.fail("reduces", grad, f"the gradient of {param.fqn!r} is never reduced")
        if not _is_result(ops.origin(grad), param.fqn, reduce):
            facts.fail(
                "reduces",
                grad,
                f"%{grad.name} is returned as the gradient of {param.fqn!r}, which "
                f"%{reduce.name} reduces",
            )
        layout = facts.plan.layouts[param.fqn]
        low = layout.precision is not None and layout.precision.keep_low_precision_grads
        if grad.meta["val"].dtype != layout.dtype and not low:
            facts.fail(
                "reduces",
                grad,
                f"the gradient of {param.fqn!r} is returned in {grad.meta['val'].dtype}, and must "
                f"be in {layout.dtype}; cast what was reduced",
            )


def check_order(facts: Facts) -> None:
    """Gathers, reduces and averages over replicas each keep their order from pass to pass.

    All ranks run one program, so its collectives are in one total order. A pass may move a gather
    past reduces and compute, and a reduce past gathers and compute. Two collectives with the same
    phase, operator, unit, parameters and group count as the same one, even if a pass made its node
    again. A pass may also add, drop, split and merge collectives. The rule then covers those that
    occur as often as before, if every collective that moves one of their parameters does, too.
    """
    if facts.reference is None:
        return
    for kind in ("gather", "reduce", "average"):
        before = [item for item in facts.reference.collectives if _kind(item[0]) == kind]
        after = [item for item in facts.issued if _kind(item[0]) == kind]
        was, now = _occurrences(before), _occurrences(after)
        unchanged = {
            item[0]
            for item in before
            if all(was[each] == now[each] for each in _with_each_param(item[0]))
        }
        expected = [item for item in before if item[0] in unchanged]
        issued = [item for item in after if item[0] in unchanged]
        for (expected_key, old), (key, node) in zip(expected, issued, strict=True):
            if key != expected_key:
                facts.fail(
                    "order",
                    node,
                    f"it is issued where %{old.name} was before the pass; every rank must issue "
                    "one sequence of collectives, so gathers keep their order, and reduces theirs",
                )


def _occurrences(collectives: Iterable[Issued]) -> Counter[CollectiveKey]:
    """The number of times that each collective occurs, and that its kind moves each parameter."""
    return Counter(each for key, _ in collectives for each in _with_each_param(key))


def _with_each_param(key: CollectiveKey) -> list[CollectiveKey]:
    """The key of a collective, and one more for each parameter alone."""
    phase, op, _, params, group = key
    return [key, *((phase, op, "of one", (param,), group) for param in params)]


def _kind(key: CollectiveKey) -> str:
    _, op, _, _, group = key
    if op == ops.all_gather.__name__:
        return "gather"
    return "average" if group == ops.REPLICATE else "reduce"


def _operands(facts: Facts, collective: fx.Node) -> tuple[list[fx.Node], list[ParamLayout]]:
    """The operands of a collective, and the layouts of their parameters."""
    operands, arguments = operands_of(collective), Collective.of(collective)
    fault = fault_in(collective)
    if fault is not None:
        facts.fail("operands", collective, fault)
    for name, owner in zip(arguments.params, arguments.units, strict=True):
        if name not in facts.params:
            facts.fail("operands", collective, f"the program has no parameter {name!r}")
        if facts.params[name].ignored:
            facts.fail("operands", collective, f"{name!r} is ignored: it is each rank's own")
        if facts.plan.unit_of_param(name) != owner:
            facts.fail("operands", collective, f"{name!r} is not a parameter of unit {owner!r}")
    layouts = [facts.plan.layouts[name] for name in arguments.params]
    dims = tuple(layout.dim for layout in layouts)
    if tuple(arguments.dims) != dims:
        facts.fail("operands", collective, f"the layouts say dims={dims}")
    return operands, layouts


def _check_values(facts: Facts, collective: fx.Node, shapes: list[tuple[int, ...]]) -> None:
    """Raise unless its results, and the picked ones, have `shapes` and the operands' dtypes."""
    dtypes = [operand.meta["val"].dtype for operand in operands_of(collective)]
    expected = list(zip(shapes, dtypes, strict=True))
    for wait in facts.waits[collective]:
        results = [signature(val) for val in wait.meta["val"]]
        if results != expected:
            facts.fail("shapes", wait, f"it returns {results}; the layouts say {expected}")
        _check_picked(facts, wait, expected)


def _check_picked(facts: Facts, wait: fx.Node, expected: list[tuple[Any, ...]]) -> None:
    for user in wait.users:
        if not ops.is_unpack(user):
            continue
        index = user.args[1]
        if not isinstance(index, int) or not 0 <= index < len(expected):
            facts.fail("shapes", user, f"%{wait.name} has no result {index!r}")
        if signature(user.meta["val"]) != expected[index]:
            facts.fail(
                "shapes",
                user,
                f"it is {signature(user.meta['val'])}; the layout says {expected[index]}",
            )


def check_groups(facts: Facts) -> None:
    """A collective joins a group that the mesh has and that this kind of collective may join."""
    for node in facts.collectives:
        op, group = ops.OPS[node.target], ops.group_of(node)
        allowed = op.groups if facts.plan.has_replicas else op.groups - {ops.REPLICATE, ops.ALL}
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
            if not _is_result(ops.origin(operand), name, reduced_by.get(name)):
                facts.fail("replicas", node, f"%{operand.name} is no reduced shard of {name!r}")
            averages[name] = node
        _check_values(facts, node, [facts.plan.layouts[name].shard_shape for name in params])
    if facts.plan.has_replicas and Stage.AVERAGED in facts.done:
        _check_all_averaged(facts, reduced_by, averages)
    return averages


def _is_result(node: fx.Node, name: str, collective: fx.Node | None) -> bool:
    """Whether `node` picks the result for the parameter `name` from the wait of `collective`."""
    if collective is None or not ops.is_unpack(node) or ops.collective_of(node) is not collective:
        return False
    return params_of(collective)[node.args[1]] == name  # type: ignore[index]


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
    gather = ops.collective_of(node) if ops.is_unpack(node) else None
    return gather is not None and ops.is_gather(gather) and _is_result(node, name, gather)
