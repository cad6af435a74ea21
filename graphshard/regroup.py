"""Edits that change which tensors one collective of a finished program moves together."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from graphshard import ops
from graphshard.program import Program
from graphshard.rewrite import insert_node, keep_operands, kwargs_for
from graphshard.views import transfers_after, transfers_into, unpacks


def issue_of(collective: fx.Node) -> list[fx.Node]:
    """What is issued with `collective`: the transfers of its operands, then it."""
    return [*transfers_into(collective), collective]


def gather_again(
    program: Program,
    wait: fx.Node,
    indices: Sequence[int],
    *,
    issued: fx.Node,
    waited: fx.Node,
    phase: str,
) -> tuple[fx.Node, dict[int, fx.Node]]:
    """Another gather of some of the parameters that `wait` returns, as its own gather has them.

    Args:
        program: what is rewritten.
        wait: of the gather to be repeated.
        indices: of its operands, in order.
        issued: the node to issue it before.
        waited: the node to wait for it before.
        phase: of the new nodes.

    Returns:
        The new wait, and the new full value by index.
    """
    gather = ops.collective_of(wait)
    unit = str(gather.kwargs["unit"])
    label = unit or "root"
    place = {"unit": unit, "phase": phase}
    operands: Sequence[fx.Node] = gather.args[0]  # type: ignore[assignment]
    vals = [wait.meta["val"][index] for index in indices]
    with program.graph.inserting_before(issued):
        shards = [_copied(program, operands[index], phase) for index in indices]
        again = insert_node(
            program,
            ops.all_gather,
            (shards,),
            kwargs_for(gather, indices),
            name=f"{label}_all_gather",
            val=None,
            **place,
        )
    with program.graph.inserting_before(waited):
        new = insert_node(program, ops.wait, (again,), {}, name=f"{label}_full", val=vals, **place)
        names: Sequence[str] = again.kwargs["params"]  # type: ignore[assignment]
        values = {
            index: insert_node(
                program,
                operator.getitem,
                (new, position),
                {},
                name=f"{names[position]}_full",
                val=vals[position],
                **place,
            )
            for position, index in enumerate(indices)
        }
    return new, values


def _copied(program: Program, operand: fx.Node, phase: str) -> fx.Node:
    """`operand` with its transfers made again, at the insertion point."""
    if not ops.is_transfer(operand):
        return operand
    source = operand.args[0]
    assert isinstance(source, fx.Node)
    base = _copied(program, source, phase)
    again = program.graph.node_copy(operand, lambda node: base if node is source else node)
    again.meta = {**operand.meta, "phase": phase}
    return again


def insert_free(program: Program, wait: fx.Node, after: fx.Node) -> fx.Node:
    """Free what `wait` of a gather returned right after the node `after`."""
    unit = wait.meta["unit"]
    with program.graph.inserting_after(after):
        return insert_node(
            program,
            ops.free,
            (wait,),
            {},
            name=f"{unit or 'root'}_free",
            unit=unit,
            phase=after.meta["phase"],
            val=None,
        )


def take_operands(program: Program, wait: fx.Node, take: Iterable[int]) -> fx.Node:
    """Give the operands at `take` a collective and a wait of their own, right before the old ones.

    What picks their results picks them from the new wait, which is returned.
    """
    indices = sorted(set(take))
    collective = ops.collective_of(wait)
    operands: Sequence[fx.Node] = collective.args[0]  # type: ignore[assignment]
    picked = {node.args[1]: node for node in unpacks(wait)}
    place = {"unit": collective.meta["unit"], "phase": collective.meta["phase"]}
    label = collective.meta["unit"] or "root"
    with program.graph.inserting_before(collective):
        new = insert_node(
            program,
            collective.target,
            ([operands[index] for index in indices],),
            kwargs_for(collective, indices),
            name=f"{label}_{ops.op_name(collective)}",
            val=None,
            **place,
        )
    with program.graph.inserting_before(wait):
        vals = [wait.meta["val"][index] for index in indices]
        name = "full" if collective.target is ops.all_gather else "reduced"
        own = insert_node(program, ops.wait, (new,), {}, name=f"{label}_{name}", val=vals, **place)
    for position, index in enumerate(indices):
        if index in picked:
            picked[index].args = (own, position)
    keep_operands(wait, [index for index in range(len(operands)) if index not in indices])
    return own


def join_gathers(program: Program, first: fx.Node, second: fx.Node) -> None:
    """Let the gather that `first` waits for gather what `second`'s does, too.

    It is issued and waited for where the earlier one is. All of it is freed where `second` is.
    """
    into, gather = ops.collective_of(first), ops.collective_of(second)
    for node in issue_of(gather)[:-1]:
        into.prepend(node)
    offset = len(first.meta["val"])
    into.kwargs = _joined_kwargs(into, gather)
    into.args = ([*into.args[0], *gather.args[0]],)  # type: ignore[misc]
    first.meta["val"] = [*first.meta["val"], *second.meta["val"]]
    after = first
    for node in unpacks(second):
        node.args = (first, offset + node.args[1])  # type: ignore[operator]
        after.append(node)
        after = node
    for node in [user for user in first.users if user.target is ops.free]:
        program.graph.erase_node(node)
    for node in [user for user in second.users if user.target is ops.free]:
        node.args = (first,)
        node.meta["unit"] = into.meta["unit"]
    for node in (second, gather):
        program.graph.erase_node(node)


def join_reduces(program: Program, first: fx.Node, second: fx.Node) -> None:
    """Let the reduce that `second` waits for reduce what `first`'s does, too: the later of the two.

    What is done with the earlier one's results follows the later wait.
    """
    reduce, into = ops.collective_of(first), ops.collective_of(second)
    offset = len(reduce.args[0])  # type: ignore[arg-type]
    for node in unpacks(second):
        node.args = (second, offset + node.args[1])  # type: ignore[operator]
    second.meta["val"] = [*first.meta["val"], *second.meta["val"]]
    into.kwargs = _joined_kwargs(reduce, into)
    into.args = ([*reduce.args[0], *into.args[0]],)  # type: ignore[misc]
    into.meta["unit"] = second.meta["unit"] = reduce.meta["unit"]
    picked = unpacks(first)
    after = second
    for node in [node for node in (*picked, *follow_ups(picked)) if node < second]:
        after.append(node)
        after = node
    for node in picked:
        node.args = (second, node.args[1])
    for node in (first, reduce):
        program.graph.erase_node(node)


def follow_ups(picked: Sequence[fx.Node]) -> list[fx.Node]:
    """What is done right away with the results `picked` of a reduce, in order: transfers, keeps,
    and averages over the replicas, which are launched then and waited for later.
    """
    further = {node for one in picked for node in transfers_after(one)}
    users = {user for node in (*picked, *further) for user in node.users}
    return sorted(further | {user for user in users if ops.is_collective(user)})


def units_of(collective: fx.Node) -> tuple[str, ...]:
    """The unit of each operand of `collective`."""
    kwargs: Mapping[str, Any] = collective.kwargs
    return tuple(kwargs.get("units", (kwargs["unit"],) * len(kwargs["params"])))


def _joined_kwargs(first: fx.Node, second: fx.Node) -> dict[str, Any]:
    """The keyword arguments of one collective for the operands of both."""
    one: Mapping[str, Any] = first.kwargs
    two: Mapping[str, Any] = second.kwargs
    params = (*one["params"], *two["params"])
    joined = {**one, "params": params, "units": (*units_of(first), *units_of(second))}
    dims = tuple(
        dim for kwargs in (one, two) for dim in kwargs.get("dims", (0,) * len(kwargs["params"]))
    )
    return joined | ({"dims": dims} if any(dims) else {})
