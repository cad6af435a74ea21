"""Edits that passes share: insert, split, merge and drop collectives, and redirect readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import (
    ParameterSource,
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
    """A FakeTensor of `shape` like `like`, contiguous unless `stride` is given."""
    strides = None if stride is None else tuple(stride)
    return _fake(like.fake_mode, tuple(shape), strides, like.dtype, like.device)


def fake_on(like: Any, device: str | torch.device) -> torch.Tensor:
    """A FakeTensor like `like`, on another device."""
    return _fake(like.fake_mode, like.shape, like.stride(), like.dtype, torch.device(device))


def fake_as(like: Any, dtype: torch.dtype) -> torch.Tensor:
    """A FakeTensor like `like`, of another dtype."""
    return _fake(like.fake_mode, like.shape, like.stride(), dtype, like.device)


def _fake(
    mode: Any,
    shape: Sequence[Any],
    stride: Sequence[Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A FakeTensor of `mode`, cached, as passes ask for the same few thousands of times."""
    fakes: dict[Any, torch.Tensor] = vars(mode).setdefault("_graphshard_fakes", {})
    key = tuple(shape), None if stride is None else tuple(stride), dtype, device
    numbers = all(type(number) is int for number in (*shape, *(stride or ())))
    if numbers and key in fakes:
        return fakes[key]
    with mode:
        if stride is None:
            fake = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            fake = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    if numbers:
        fakes[key] = fake
    return fake


def entries_by_name(program: Program) -> dict[str, ParamEntry]:
    """The program's parameters by FQN."""
    return {param.fqn: param for param in program.params}


def insert_node(
    program: Program,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    name: str,
    unit: str,
    phase: str,
    val: Any = None,
) -> fx.Node:
    """Insert a node of `unit` at the graph's insertion point.

    `name` should end in a word, as in "layers.1_free", since fx strips a number at the end.
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
    """Insert a `to_host`, `to_device` or `arrive` of `source` at the graph's insertion point.

    `param` and `unit` name the parameter whose shard or gradient is copied; without them it is an
    activation of the unit of `source`.
    """
    val = source.meta["val"]
    if target is not ops.arrive:
        val = fake_on(val, "cpu" if target is ops.to_host else program.capture_device)
    unit = source.meta["unit"] if unit is None else unit
    kwargs = {"unit": unit, "param": param}
    return insert_node(
        program, target, (source,), kwargs, name=name, unit=unit, phase=phase, val=val
    )


def note_copies(program: Program, subject: str, *, params: bool) -> None:
    """Note on the program how many bytes a step copies between host and device.

    It replaces an earlier note on `subject`. `params`: count copies of parameters and gradients, or
    else those of activations.
    """
    texts = []
    for target, where in ((ops.to_device, "to the device"), (ops.to_host, "to the host")):
        copies = [
            node
            for node in program.nodes()
            if node.target is target and (param_of(node) is not None) == params
        ]
        texts.append(f"{bytes_text(copies)} bytes in {len(copies):,} copies {where}")
    others = tuple(note for note in program.notes if not note.startswith(f"{subject}: "))
    program.notes = (*others, f"{subject}: {', '.join(texts)}, each step")


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
    """Insert one all_gather of `params` and its wait before a node; return the full values.

    With `parts`, the operands are these results of `reshard` (by parameter) instead of the shards,
    and the gather joins a "reshard" group.
    """
    chosen = set(params)
    names = tuple(name for name in plan.unit(unit).params if name in chosen)
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
    """Insert one reduce and its wait after the node `after`.

    `grads` has the gradient to reduce and the shape of its result, by parameter. Returns the
    reduced gradient by parameter, and the last node inserted.
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
    """The collective of the parameters `names` of `unit`, with their layouts in the plan."""
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
    derived: Mapping[fx.Node, ParameterSource],
    values: Mapping[str, fx.Node],
    *,
    unit: str,
    rewired: Iterable[fx.Node] = (),
) -> list[fx.Node]:
    """Redirect `readers` to `values`, the full value by parameter.

    A reader that is itself a view or cast of a parameter stays in place and reads the new value.
    Other views and casts that the readers need are computed again right before them. `readers` are
    in the order of the graph; `rewired` are views and casts that read `values` already. Returns
    those that this call redirected.
    """
    current: dict[fx.Node, fx.Node] = {node: node for node in rewired}
    redirected: list[fx.Node] = []

    def resolve(value: fx.Node, before: fx.Node) -> fx.Node:
        if value in current:
            return current[value]
        source = derived[value]
        if source.base is None:
            return values[source.param]
        base = resolve(source.base, before)
        stale = tensor_inputs(value)[0]  # may read another gather by now
        with before.graph.inserting_before(before):
            copied = before.graph.node_copy(value, lambda n: base if n is stale else n)
        copied.meta = {**value.meta, "phase": before.meta["phase"], "unit": unit}
        current[value] = copied
        return copied

    for reader in readers:
        for value in reader.all_input_nodes:
            source = derived.get(value)
            if source is None or source.param not in values:
                continue
            replacement = resolve(value, reader)
            if replacement is not value:
                reader.replace_input_with(value, replacement)
        reader_source = derived.get(reader)
        if reader_source is not None and reader_source.param in values:
            current[reader] = reader
            redirected.append(reader)
    return redirected


def erase_dead(nodes: Iterable[fx.Node]) -> None:
    """Erase the nodes in `nodes` (in graph order) that nothing reads."""
    for node in reversed(list(nodes)):
        if not node.users:
            node.graph.erase_node(node)


def prune_gather(wait: fx.Node) -> None:
    """Remove unread parameters from a gather, or the whole gather if all are unread."""
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
    """Remove all operands but those at `accumulate_grad` from the collective that `wait` ends."""
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
    """The nodes that issue `collective`: the transfers of its operands, then the collective."""
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
    """Gather the parameters at `indices` of the result of `wait` a second time.

    The gather is inserted before `issued`, its wait before `waited`. Returns the new wait, and the
    new full value by index.
    """
    gather = ops.collective_of(wait)
    operands = operands_of(gather)
    with program.graph.inserting_before(issued):
        shards = [_copied(program, operands[index], phase) for index in indices]
    new_wait, values = insert_collective(
        program,
        Collective.of(gather).pick(indices),
        shards,
        [wait.meta["val"][index] for index in indices],
        issue=issued,
        wait=waited,
        phase=phase,
    )
    return new_wait, dict(zip(indices, values, strict=True))


def _copied(program: Program, operand: fx.Node, phase: str) -> fx.Node:
    """Copy the transfers of `operand` to the insertion point; returns the last of them."""
    if not ops.is_transfer(operand):
        return operand
    source = operand.args[0]
    assert isinstance(source, fx.Node)
    base = _copied(program, source, phase)
    copied = program.graph.node_copy(operand, lambda node: base if node is source else node)
    copied.meta = {**operand.meta, "phase": phase}
    return copied


def insert_free(program: Program, wait: fx.Node, after: fx.Node) -> fx.Node:
    """Insert a `free` of the gather that `wait` ends, right after the node `after`."""
    unit = wait.meta["unit"]
    with program.graph.inserting_after(after):
        return insert_node(
            program,
            ops.free,
            (wait,),
            name=f"{unit or 'root'}_free",
            unit=unit,
            phase=after.meta["phase"],
        )


def take_operands(program: Program, wait: fx.Node, take: Iterable[int]) -> fx.Node:
    """Move the operands at `take` into a new collective and wait, right before the old ones.

    Nodes that pick their results pick them from the new wait, which is returned.
    """
    indices = sorted(set(take))
    collective = ops.collective_of(wait)
    operands = operands_of(collective)
    picked = {node.args[1]: node for node in unpacks(wait)}
    new_wait, results = insert_collective(
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
            picked[index].args = (new_wait, position)
    keep_operands(wait, [index for index in range(len(operands)) if index not in indices])
    return new_wait


def join_gathers(program: Program, first: fx.Node, second: fx.Node) -> None:
    """Merge the gather that `second` ends into the earlier one that `first` ends.

    The merged gather is issued and waited for in place of the earlier one. All its parameters are
    freed at the later of the two frees.
    """
    merged, gather = ops.collective_of(first), ops.collective_of(second)
    for node in issue_of(gather)[:-1]:
        merged.prepend(node)
    offset = len(first.meta["val"])
    frees = sorted(user for user in (*first.users, *second.users) if user.target is ops.free)
    merged.kwargs = (Collective.of(merged) + Collective.of(gather)).kwargs
    merged.args = ([*operands_of(merged), *operands_of(gather)],)
    first.meta["val"] = [*first.meta["val"], *second.meta["val"]]
    last = first
    for node in unpacks(second):
        node.args = (first, offset + node.args[1])  # type: ignore[operator]
        last.append(node)
        last = node
    for node in frees[-1:]:
        node.args = (first,)
        node.meta["unit"] = merged.meta["unit"]
    for node in (*frees[:-1], second, gather):
        program.graph.erase_node(node)


def join_reduces(program: Program, waits: Sequence[fx.Node]) -> None:
    """Merge the reduces that `waits` end, in order of the graph, into the last of them.

    The nodes that process the earlier results move behind the last wait.
    """
    *earlier, wait = waits
    *reduces, merged = map(ops.collective_of, waits)
    offset = sum(len(each.meta["val"]) for each in earlier)
    for node in unpacks(wait):
        node.args = (wait, offset + node.args[1])  # type: ignore[operator]
    wait.meta["val"] = [val for each in waits for val in each.meta["val"]]
    merged.args = ([value for each in (*reduces, merged) for value in operands_of(each)],)
    merged.kwargs = reduce(add, map(Collective.of, (*reduces, merged))).kwargs
    merged.meta["unit"] = wait.meta["unit"] = reduces[0].meta["unit"]
    picked = [node for each in earlier for node in unpacks(each)]
    last = wait
    for node in [node for node in (*picked, *follow_ups(picked)) if node < wait]:
        last.append(node)
        last = node
    for index, node in enumerate(picked):
        node.args = (wait, index)
    for node in (*earlier, *reduces):
        program.graph.erase_node(node)


def follow_ups(picked: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that process the results `picked` of a reduce, in order.

    They are the transfers, each `accumulate_grad`, and the averages over replicas, which are waited
    for later.
    """
    transfers = {node for result in picked for node in transfers_after(result)}
    users = {user for node in (*picked, *transfers) for user in node.users}
    return sorted(transfers | {user for user in users if ops.is_collective(user)})
