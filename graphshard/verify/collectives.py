"""Rules on shards and collectives: what is gathered, waited for and reduced, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
from graphshard.program.program import signature
from graphshard.verify.facts import CollectiveKey, Facts, collective_key
from graphshard.verify.groups import averaged_by


class Pieces:
    """The reduces that move some columns of a gradient, by parameter, in order."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.of_param: dict[str, list[fx.Node]] = {}

    def layouts(self, reduce: fx.Node, layouts: list[ParamLayout]) -> list[ParamLayout]:
        """The layouts of what `reduce` moves: of its columns, if it moves some.

        They must follow those of the reduces before.
        """
        columns = Collective.of(reduce).columns
        if columns is None:
            return layouts
        (layout, *others) = layouts
        width = len(layout.shape) - 1
        if others or width < 1 or layout.dim == width:
            self.facts.fail(
                "reduces", reduce, "columns are of one parameter, and not split over the ranks"
            )
        before = self.of_param.setdefault(layout.fqn, [])
        start = _end(before[-1]) if before else 0
        if columns[0] != start or not start < columns[1] <= layout.shape[-1]:
            self.facts.fail(
                "reduces", reduce, f"it reduces columns {columns}; those from {start} are next"
            )
        before.append(reduce)
        return [layout.columns(*columns)]

    def are_of(self, reduce: fx.Node, param: str) -> bool:
        """Whether `reduce` moves columns of `param`, and one before it did, too."""
        return reduce in self.of_param.get(param, [])[1:]

    def check_complete(self) -> None:
        """The last columns are reduced as well."""
        for name, reduces in self.of_param.items():
            if _end(reduces[-1]) != self.facts.plan.layouts[name].shape[-1]:
                self.facts.fail(
                    "reduces", reduces[-1], f"the last columns of {name!r} are never reduced"
                )

    def picked(self, grad: fx.Node, param: str) -> fx.Node:
        """What is picked out of the last reduce for `grad`, the whole gradient of `param`."""
        node = ops.origin(grad)
        parts = ops.joined(node)
        if parts and list(map(ops.collective_of, parts)) == self.of_param.get(param):
            return parts[-1]
        return node


def _end(reduce: fx.Node) -> int:
    columns = Collective.of(reduce).columns
    assert columns is not None
    return columns[1]


def check_shards(facts: Facts) -> None:
    """Once unsharded, a sharded parameter enters as its shard and is read by gathers only."""
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
        for user in _readers(param.node):
            if user.target is not ops.all_gather:
                facts.fail(
                    "shards",
                    user,
                    f"it reads the shard of {param.fqn!r} as if it were the parameter; read what "
                    "a gather returns",
                )


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads `node`, or what it is after transfers."""
    found = list(node.users)
    for user in found:  # grows while it is walked
        if ops.is_transfer(user):
            found += user.users
    return [user for user in found if not ops.is_transfer(user)]


def check_transfers(facts: Facts) -> None:
    """A transfer says its unit and a parameter of it; only a cast changes a dtype, to what it says.

    What is no parameter's (an activation) says None.
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
        expected = (shape, dtype if node.target is ops.cast else was)
        if signature(node.meta["val"]) != expected:
            found = signature(node.meta["val"])
            facts.fail("shapes", node, f"it is {found}, and must be {expected}")


def check_gathers(facts: Facts) -> None:
    """A gather takes shards of its own unit, and gives their full parameters, in their dtypes.

    One within a smaller group takes what `reshard` kept for that group.
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
        dtypes = [operand.meta["val"].dtype for operand in operands]
        expected = [(one.shape, dtype) for one, dtype in zip(layouts, dtypes, strict=True)]
        for wait in facts.waits[gather]:
            _check_values(facts, wait, expected)


def _is_part(facts: Facts, node: fx.Node, gather: fx.Node, name: str) -> bool:
    """Whether `node` is what the ranks of `gather` have of the parameter `name`."""
    if ops.group_of(gather) != ops.RESHARD:
        return node is facts.params[name].node
    if node.target is not ops.reshard:
        return False
    part = OneTensor.of(node)
    return (part.param, part.ranks) == (name, Collective.of(gather).ranks)


def check_waits(facts: Facts) -> None:
    """Every collective is waited for once, in its own phase; its results are picked from that."""
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
    """Every trainable parameter's gradient is reduced exactly once, and returned so."""
    reduced_by: dict[str, fx.Node] = {}
    pieces = Pieces(facts)
    for reduce in facts.collectives:
        if reduce.target not in ops.REDUCES or ops.group_of(reduce) == ops.REPLICATE:
            continue
        operands, layouts = _operands(facts, reduce)
        layouts = pieces.layouts(reduce, layouts)
        for operand, layout in zip(operands, layouts, strict=True):
            before = reduced_by.get(layout.fqn)
            if before is not None and not pieces.are_of(reduce, layout.fqn):
                facts.fail(
                    "reduces",
                    reduce,
                    f"the gradient of {layout.fqn!r} is reduced here and by %{before.name}",
                )
            reduced_by[layout.fqn] = reduce
            _check_operand(facts, reduce, operand, layout)
        dtypes = [operand.meta["val"].dtype for operand in operands]
        expected = [(one.shard_shape, dtype) for one, dtype in zip(layouts, dtypes, strict=True)]
        for wait in facts.waits[reduce]:
            _check_values(facts, wait, expected)
    pieces.check_complete()
    _check_returned(facts, reduced_by | averaged_by(facts, reduced_by), pieces)


def _check_operand(facts: Facts, reduce: fx.Node, operand: fx.Node, layout: ParamLayout) -> None:
    """What is reduced is a gradient of the parameter, and in the way that its layout asks for."""
    if layout.sharded != ops.is_scatter(reduce):
        facts.fail("reduces", reduce, f"{layout.fqn!r} is {layout.placement}ed")
    found = signature(operand.meta["val"])
    # In another dtype if a cast says so, or it is computed in another.
    told = ops.is_transfer(operand) or layout.precision is not None
    if found[0] != layout.shape or (found[1] != layout.dtype and not told):
        facts.fail(
            "reduces",
            reduce,
            f"%{operand.name} is {found}, no gradient of "
            f"{layout.fqn!r} {(layout.shape, layout.dtype)}",
        )


def _check_returned(facts: Facts, reduced_by: dict[str, fx.Node], pieces: Pieces) -> None:
    grads = facts.program.results().grads
    kept = {param_of(node) for node in facts.nodes if node.target is ops.keep}
    for param, grad in zip(facts.program.params, grads, strict=True):
        if grad is None and param.fqn in kept:
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
        picked = pieces.picked(grad, param.fqn)
        if (
            not ops.is_unpack(picked)
            or ops.collective_of(picked) is not reduce
            or params_of(reduce)[picked.args[1]] != param.fqn  # type: ignore[index]
        ):
            facts.fail(
                "reduces",
                grad,
                f"%{grad.name} is returned as the gradient of {param.fqn!r}, which "
                f"%{reduce.name} reduces",
            )
        layout = facts.plan.layouts[param.fqn]
        stays = layout.precision is not None and layout.precision.keep_low_precision_grads
        if grad.meta["val"].dtype != layout.dtype and not stays:
            facts.fail(
                "reduces",
                grad,
                f"the gradient of {param.fqn!r} is returned in {grad.meta['val'].dtype}, and must "
                f"be in {layout.dtype}; cast what was reduced",
            )


def check_order(facts: Facts) -> None:
    """All ranks run one program, so its order of collectives is total; passes keep most of it.

    Gathers may move past reduces and compute, and reduces past gathers and compute. Within a phase,
    gathers keep their order among each other, and so do reduces, and averages over the replicas,
    however often a pass made their nodes anew: those of one phase, operator, unit, parameters and
    group count as one and the same. A pass may add, drop, part and merge collectives; then those
    that occur as often as before, and so do all that move any of their parameters, keep their
    order.
    """
    if facts.reference is None:
        return
    now_issued = [(collective_key(node), node) for node in facts.collectives]
    for kind in ("gather", "reduce", "average"):
        before = [item for item in facts.reference.collectives if _kind(item[0]) == kind]
        after = [item for item in now_issued if _kind(item[0]) == kind]
        was, now = _occurrences(before), _occurrences(after)
        kept = {
            item[0]
            for item in before
            if all(was[part] == now[part] for part in _with_parts(item[0]))
        }
        expected = [item for item in before if item[0] in kept]
        found = [item for item in after if item[0] in kept]
        for (wanted, name), (key, node) in zip(expected, found, strict=True):
            if key != wanted:
                facts.fail(
                    "order",
                    node,
                    f"it is issued where %{name} was before the pass; every rank must issue one "
                    "sequence of collectives, so gathers keep their order, and reduces theirs",
                )


def _occurrences(collectives: Iterable[tuple[CollectiveKey, Any]]) -> Counter[CollectiveKey]:
    """How often each collective occurs, and each parameter is moved by one of its kind."""
    return Counter(part for key, _ in collectives for part in _with_parts(key))


def _with_parts(key: CollectiveKey) -> list[CollectiveKey]:
    """A collective, and the like for each of its parameters."""
    phase, op, _, params, group = key
    return [key, *((phase, op, "of one", (param,), group) for param in params)]


def _kind(key: CollectiveKey) -> str:
    _, op, _, _, group = key
    if op == ops.all_gather.__name__:
        return "gather"
    return "average" if group == ops.REPLICATE else "reduce"


def _operands(facts: Facts, collective: fx.Node) -> tuple[list[fx.Node], list[ParamLayout]]:
    """The operands of a collective and the layouts of the parameters they belong to."""
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


def _check_values(facts: Facts, wait: fx.Node, expected: list[tuple[Any, ...]]) -> None:
    """What a wait returns, and what is picked from it, has the expected shapes and dtypes."""
    found = [signature(val) for val in wait.meta["val"]]
    if found != expected:
        facts.fail("shapes", wait, f"it returns {found}; the layouts say {expected}")
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
