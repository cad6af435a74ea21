"""The few edits passes make: insert a gather or a reduce, point uses at it, drop what is dead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import (
    Source,
    bytes_text,
    tensor_inputs,
    transfers_after,
    transfers_into,
    unpacks,
)
from graphshard.program.collective import (
    Collective,
    insert_collective,
    operands_of,
    param_of,
)
from graphshard.program.program import ParamEntry, Program


def fake_like(like: Any, shape: Sequence[int], stride: Sequence[int] | None = None) -> torch.Tensor:
    """A FakeTensor on the device and in the mode of `like`, contiguous unless `stride` is given."""
    strides = None if stride is None else tuple(stride)
    return _fake(like.fake_mode, tuple(shape), strides, like.dtype, like.device)


def fake_on(like: Any, device: str | torch.device) -> torch.Tensor:
    """A FakeTensor as `like`, on another device."""
    return _fake(like.fake_mode, like.shape, like.stride(), like.dtype, torch.device(device))


def fake_as(like: Any, dtype: torch.dtype) -> torch.Tensor:
    """A FakeTensor as `like`, of another dtype."""
    return _fake(like.fake_mode, like.shape, like.stride(), dtype, like.device)


def _fake(
    mode: Any,
    shape: Sequence[Any],
    stride: Sequence[Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """One FakeTensor of `mode` for all that are asked for alike: passes make thousands of few."""
    made: dict[Any, torch.Tensor] = vars(mode).setdefault("_graphshard_made", {})
    key = tuple(shape), None if stride is None else tuple(stride), dtype, device
    numbers = all(type(number) is int for number in (*shape, *(stride or ())))
    if numbers and key in made:
        return made[key]
    with mode:
        if stride is None:
            found = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            found = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    if numbers:
        made[key] = found
    return found


def entries_by_name(program: Program) -> dict[str, ParamEntry]:
    """The program's parameters by FQN."""
    return {param.fqn: param for param in program.params}


def insert_node(
    program: Program,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    unit: str,
    phase: str,
    val: Any,
) -> fx.Node:
    """A node of `unit` at the graph's insertion point.

    fx drops a number that ends a name, so `name` should end in a word: "layers.1_free".
    """
    node = program.graph.create_node("call_function", target, args, kwargs, name=name)
    node.meta.update(val=val, phase=phase, fqn=unit, unit=unit)
    return node


def insert_copy(
    program: Program,
    target: Any,
    source: fx.Node,
    *,
    name: str,
    phase: str,
    param: str | None = None,
    unit: str | None = None,
) -> fx.Node:
    """A `to_host`, `to_device` or `arrive` of `source`, at the graph's insertion point.

    Args:
        program: what is rewritten.
        target: the vocabulary function.
        source: what is copied, or the copy to arrive.
        name: of the node; see `insert_node`.
        phase: of the node.
        param: the parameter whose shard or gradient it is; None for an activation.
        unit: whose it is; None for the unit of `source`.
    """
    val = source.meta["val"]
    if target is not ops.arrive:
        val = fake_on(val, "cpu" if target is ops.to_host else program.capture_device)
    unit = source.meta["unit"] if unit is None else unit
    kwargs = {"unit": unit, "param": param}
    return insert_node(
        program, target, (source,), kwargs, name=name, unit=unit, phase=phase, val=val
    )


def note_copies(program: Program, what: str, *, params: bool) -> None:
    """Note on the program how much one step copies between host and device, of `params` or not.

    A note on the same from before is replaced.
    """
    said = []
    for target, where in ((ops.to_device, "to the device"), (ops.to_host, "to the host")):
        copies = [
            node
            for node in program.nodes()
            if node.target is target and (param_of(node) is not None) == params
        ]
        said.append(f"{bytes_text(copies)} bytes in {len(copies):,} copies {where}")
    others = tuple(note for note in program.notes if not note.startswith(f"{what}: "))
    program.notes = (*others, f"{what}: {', '.join(said)}, each step")


def insert_gather(
    program: Program,
    plan: ShardingPlan,
    unit: str,
    params: Iterable[str],
    *,
    entries: Mapping[str, ParamEntry],
    before: fx.Node,
    phase: str,
    parts: Mapping[str, fx.Node] | None = None,
) -> dict[str, fx.Node]:
    """One all_gather, its wait and its tensors before `before`: the full value by parameter.

    With `parts`, what `reshard` kept of each parameter is gathered in its group.
    """
    wanted = set(params)
    names = tuple(name for name in plan.unit(unit).params if name in wanted)
    shards = [(entries[name].node if parts is None else parts[name]) for name in names]
    group = None if parts is None else ops.RESHARD
    collective = _collective(plan, ops.all_gather, unit, names, group)
    fulls = [
        fake_like(shard.meta["val"], entries[name].shape, entries[name].stride)
        for name, shard in zip(names, shards, strict=True)
    ]
    _, values = insert_collective(
        program, collective, shards, fulls, issue=before, wait=before, phase=phase
    )
    return dict(zip(names, values, strict=True))


def insert_reduce(
    program: Program,
    plan: ShardingPlan,
    target: Any,
    unit: str,
    grads: Mapping[str, tuple[fx.Node, tuple[int, ...]]],
    *,
    after: fx.Node,
    phase: str,
    group: str | None = None,
) -> tuple[dict[str, fx.Node], fx.Node]:
    """One reduce of `grads` (the full gradient and the reduced shape, by parameter) after `after`.

    Returns the reduced gradient by parameter, and the last node inserted.
    """
    shards = [fake_like(grad.meta["val"], shape) for grad, shape in grads.values()]
    _, reduced = insert_collective(
        program,
        _collective(plan, target, unit, tuple(grads), group),
        [grad for grad, _ in grads.values()],
        shards,
        issue=after.next,
        wait=after.next,
        phase=phase,
    )
    return dict(zip(grads, reduced, strict=True)), reduced[-1]


def _collective(
    plan: ShardingPlan, target: Any, unit: str, names: tuple[str, ...], group: str | None
) -> Collective:
    """A collective of the parameters `names` of `unit`, laid out as the plan says."""
    layouts = [plan.layouts[name] for name in names]
    return Collective(
        target,
        unit,
        names,
        named_group=group,
        ranks=plan.unit(unit).options.reshard_ranks if group == ops.RESHARD else None,
        dims=tuple(layout.dim for layout in layouts),
        in_place=target is ops.all_gather and any(layout.resident for layout in layouts),
    )


def rewire(
    readers: Iterable[fx.Node],
    derived: Mapping[fx.Node, Source],
    values: Mapping[str, fx.Node],
    *,
    unit: str,
    settled: Iterable[fx.Node] = (),
) -> list[fx.Node]:
    """Point `readers` (in graph order) at `values`, the full value by parameter.

    A reader that is itself a view or cast of a parameter stays where it is, over its new value.
    Other views and casts the readers need are computed again right before them, except those in
    `settled`, which stay. Returns the views and casts that now stand on `values`.
    """
    local: dict[fx.Node, fx.Node] = {node: node for node in settled}
    kept: list[fx.Node] = []

    def resolve(value: fx.Node, before: fx.Node) -> fx.Node:
        if value in local:
            return local[value]
        source = derived[value]
        if source.base is None:
            return values[source.param]
        base = resolve(source.base, before)
        stale = tensor_inputs(value)[0]  # may stand on another gather by now
        with before.graph.inserting_before(before):
            again = before.graph.node_copy(value, lambda n: base if n is stale else n)
        again.meta = {**value.meta, "phase": before.meta["phase"], "unit": unit}
        local[value] = again
        return again

    for reader in readers:
        for value in reader.all_input_nodes:
            source = derived.get(value)
            if source is None or source.param not in values:
                continue
            now = resolve(value, reader)
            if now is not value:
                reader.replace_input_with(value, now)
        own = derived.get(reader)
        if own is not None and own.param in values:
            local[reader] = reader
            kept.append(reader)
    return kept


def erase_dead(nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` (in graph order) that nobody reads."""
    for node in reversed(list(nodes)):
        if not node.users:
            node.graph.erase_node(node)


def prune_gather(wait: fx.Node) -> None:
    """Drop from a gather the parameters whose full value nobody reads, and it with the last."""
    gather = ops.collective_of(wait)
    used = [node for node in unpacks(wait) if node.users]
    if len(used) == len(wait.meta["val"]):
        return
    for node in unpacks(wait):
        if not node.users:
            node.graph.erase_node(node)
    if not used:
        for user in list(wait.users):  # its free
            wait.graph.erase_node(user)
        wait.graph.erase_node(wait)
        transfers = transfers_into(gather)
        gather.graph.erase_node(gather)
        erase_dead(transfers)
        return
    keep = [node.args[1] for node in used]
    keep_operands(wait, keep)  # type: ignore[arg-type]


def keep_operands(wait: fx.Node, keep: Sequence[int]) -> None:
    """Leave a collective with the operands at `keep` only, and renumber what unpacks it."""
    collective = ops.collective_of(wait)
    operands = operands_of(collective)
    transfers = transfers_into(collective)
    collective.args = ([operands[i] for i in keep],)
    erase_dead(transfers)
    collective.kwargs = Collective.of(collective).pick(keep).kwargs
    wait.meta["val"] = [wait.meta["val"][i] for i in keep]
    place = {old: new for new, old in enumerate(keep)}
    for node in unpacks(wait):
        node.args = (wait, place[node.args[1]])  # type: ignore[index]


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
    operands = operands_of(gather)
    with program.graph.inserting_before(issued):
        shards = [_copied(program, operands[index], phase) for index in indices]
    again, values = insert_collective(
        program,
        Collective.of(gather).pick(indices),
        shards,
        [wait.meta["val"][index] for index in indices],
        issue=issued,
        wait=waited,
        phase=phase,
    )
    return again, dict(zip(indices, values, strict=True))


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
    operands = operands_of(collective)
    picked = {node.args[1]: node for node in unpacks(wait)}
    apart, results = insert_collective(
        program,
        Collective.of(collective).pick(indices),
        [operands[index] for index in indices],
        [wait.meta["val"][index] for index in indices],
        issue=collective,
        wait=wait,
        phase=collective.meta["phase"],
    )
    for position, (index, result) in enumerate(zip(indices, results, strict=True)):
        program.graph.erase_node(result)
        if index in picked:
            picked[index].args = (apart, position)
    keep_operands(wait, [index for index in range(len(operands)) if index not in indices])
    return apart


def join_gathers(program: Program, first: fx.Node, second: fx.Node) -> None:
    """Let the gather that `first` waits for gather what `second`'s does, too.

    It is issued and waited for where the earlier one is. All of it is freed where `second` is.
    """
    into, gather = ops.collective_of(first), ops.collective_of(second)
    for node in issue_of(gather)[:-1]:
        into.prepend(node)
    offset = len(first.meta["val"])
    into.kwargs = (Collective.of(into) + Collective.of(gather)).kwargs
    into.args = ([*operands_of(into), *operands_of(gather)],)
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
    offset = len(operands_of(reduce))
    for node in unpacks(second):
        node.args = (second, offset + node.args[1])  # type: ignore[operator]
    second.meta["val"] = [*first.meta["val"], *second.meta["val"]]
    into.kwargs = (Collective.of(reduce) + Collective.of(into)).kwargs
    into.args = ([*operands_of(reduce), *operands_of(into)],)
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
