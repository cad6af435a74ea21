"""Lowering: forward or backward of a program becomes Python that ranks run, bound to their state.

Each communication node becomes a call of a `BoundCollective`, so a step looks nothing up, and the
generated code reads

    all_gather = blocks_0_all_gather([p_blocks_0_weight, p_blocks_0_bias]);
    wait = graphshard_wait(all_gather);
    mm = aten_mm_default(view, t);

where `aten_mm_default` is the operator behind `torch.ops.aten.mm.default`, or a faster function for
the same kernels (see `codegen.call_of`), looked up once instead of at each step.

Arguments come in one list, which the code empties. So only the code itself keeps a saved activation
alive, and it is freed after its last use. The same holds for a region, which is one call:

    pack_4 = graphshard_pack(wait_full, linear);
    region_4 = graphshard_region_4(pack_4);

A parameter that is released inside a region is taken out of the gather's list when it is picked
from it, so that the region's operands hold the last reference:

    weight_full = graphshard_take(wait, 0);
    pack_4 = graphshard_pack(weight_full, linear);  weight_full = linear = None
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import is_view_op
from graphshard.program.annotations import Regions
from graphshard.program.collective import Collective, OneTensor, operands_of
from graphshard.program.finite import Check
from graphshard.program.packing import done_by_gather, reduced_in_place
from graphshard.program.program import BACKWARD, FORWARD, copy_node, events_of
from graphshard.program.regions import Region, is_fixed, picks_from, regions_in
from graphshard.runtime.accumulated import AccumulatedGrads
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.codegen import BoxedCodeGen, call_of
from graphshard.runtime.collectives import BoundCollective, Operand, wait
from graphshard.runtime.cuda_graphs import GraphPool
from graphshard.runtime.finite import FiniteReports, probe, probe_masked
from graphshard.runtime.gather import (
    AllGather,
    AllGatherInPlace,
    LocalGather,
    Reshard,
    free,
    leave,
    poison,
    release,
    release_for,
    take,
)
from graphshard.runtime.group import Group
from graphshard.runtime.reduce import (
    REDUCES,
    AllReduceByCaller,
    LocalReduce,
    ReduceScatterByExchange,
    ReduceScatterByPairExchange,
)
from graphshard.runtime.region import Forms, pack
from graphshard.runtime.shards import Shard
from graphshard.runtime.streams import bind_transfer

EVENTS = "events"
"""The key of a lowered node's `meta` for its event, behind those that gathers do themselves: the
number and the name of each."""

# Only where a call starts, since a string may contain an operator's name as well.
_OPERATOR = re.compile(r"(?<== )torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


@dataclass
class Bindings:
    """The state of a module that its lowered programs read and write.

    group: all ranks.
    shards: this rank's shards by parameter name.
    buffers: by buffer name, the dict that holds the module's buffer and its key there.
    """

    plan: ShardingPlan
    group: Group
    shards: Mapping[str, Shard]
    buffers: Mapping[str, tuple[dict[str, Any], str]]
    agreement: Agreement
    accumulated: AccumulatedGrads = field(default_factory=AccumulatedGrads)
    forms: Forms = field(default_factory=Forms)
    reports: FiniteReports = field(init=False)
    graph_pool: GraphPool = field(init=False)

    def __post_init__(self) -> None:
        self.graph_pool = GraphPool(self.group.device)
        self.reports = FiniteReports(self.group)

    def buffer(self, name: str) -> Tensor:
        """The buffer `name` that the module has now."""
        holder, leaf = self.buffers[name]
        return holder[leaf]

    def set_buffer(self, name: str, tensor: Tensor) -> None:
        """Give the module's buffer `name`, under all its names, another tensor."""
        before = self.buffer(name)
        for holder, leaf in self.buffers.values():
            if holder[leaf] is before:
                holder[leaf] = tensor


def lower(graph: fx.Graph, bindings: Bindings, table: Regions | None = None) -> fx.GraphModule:
    """A module whose `.forward(arguments)` runs `graph`, a forward or backward, on this rank.

    table: the program's regions, each of which becomes one call. None: it has none.
    """
    group = bindings.group
    lowered = fx.Graph()
    new: dict[fx.Node, Any] = {}
    regions = regions_in(graph) if table is not None else []
    inside = {node for region in regions for node in (*region.nodes, *region.releases)}
    released = {node.args[0] for region in regions for node in region.releases}
    named = _names(graph)
    ends = {_last(region): region for region in regions}
    by_gathers = _left_to_gathers(graph, group)
    skipped: list[Any] = []
    for node in graph.nodes:
        before = len(lowered.nodes)
        if node in by_gathers:
            new[node] = new[node.all_input_nodes[0]]
            skipped.append(named.get(node))
        elif node in ends:
            assert table is not None
            _call_region(lowered, ends[node], bindings.forms, table, new)
            if group.check:
                for released_inside in ends[node].releases:
                    poisoned = lowered.node_copy(released_inside, new.__getitem__)
                    poisoned.target = poison
        elif node not in inside:
            copied = new[node] = copy_node(lowered, node, new)
            _bind(copied, node, bindings, by_gathers)
            if node.target is ops.release:
                copied.target = _release_of(node, new, group)
            elif node in released and not group.check:
                copied.target = take
        _name(lowered, len(lowered.nodes) - before, skipped, named.get(node))
    for node, number in _places(graph).items():
        new[node].target.is_place(number)
    _offer_core(lowered, group)
    return module_of(lowered)


_OFFERED = 4
"""Kernels from one offer of the core to the next."""


def _offer_core(lowered: fx.Graph, group: Group) -> None:
    """Let Gloo's readers have the core after every few kernels; see README.md (gloo.py)."""
    if group.backend != "gloo" or group.size == 1 or not hasattr(os, "sched_yield"):
        return
    called = [node for node in lowered.nodes if isinstance(node.target, torch._ops.OpOverload)]
    operators = [node for node in called if not is_view_op(node.target)]
    for node in operators[_OFFERED - 1 :: _OFFERED]:
        with lowered.inserting_after(node):
            offered = lowered.create_node("call_function", os.sched_yield)
        offered.meta = {"phase": node.meta["phase"], EVENTS: node.meta[EVENTS][-1:]}


def _release_of(node: fx.Node, new: Mapping[fx.Node, Any], group: Group) -> Callable[..., None]:
    """The function that a `release` calls."""
    picked = picks_from(node.all_input_nodes[0])
    assert picked is not None
    if picked.op == "placeholder":  # gathered in forward
        freed = leave if group.shard.size == 1 else release
        return poison if group.check else freed
    gather, index = ops.released(node)
    shard = operands_of(gather)[index]
    alone = ops.is_transfer(shard) and len(shard.users) == 1
    return release_for(new[gather].target, copied=alone)


def module_of(lowered: fx.Graph) -> fx.GraphModule:
    """A module whose `.forward(arguments)` runs the lowered graph; it empties the list."""
    lowered.set_codegen(BoxedCodeGen())
    operators: dict[str, Any] = {}
    lowered.on_generate_code(lambda _: partial(_by_short_names, operators))
    module = fx.GraphModule(nn.Module(), lowered)
    run: Any = type(module).forward
    run.__globals__.update(operators)
    return module


def phase_of(graph: fx.Graph) -> str:
    """Whether `graph`, also a lowered one, is a forward or a backward."""
    phases = (node.meta["phase"] for node in graph.find_nodes(op="placeholder"))
    return BACKWARD if BACKWARD in phases else FORWARD


def _names(graph: fx.Graph) -> dict[fx.Node, tuple[int, str]]:
    """By node of forward's or backward's graph, its event's number there and name."""
    phase = phase_of(graph)
    # Those of backward in a forward graph pick results of an operator for it.
    calls = [
        node for node in graph.nodes if node.op == "call_function" and node.meta["phase"] == phase
    ]
    return {
        node: (number, event.name)
        for number, (event, nodes) in enumerate(events_of(calls))
        for node in nodes
    }


def _name(lowered: fx.Graph, count: int, skipped: list[Any], event: Any) -> None:
    """Give the last `count` nodes their event, and the first of them what was skipped before."""
    for node in islice(reversed(lowered.nodes), count):
        node.meta[EVENTS] = [event]
    if count:
        node.meta[EVENTS] = [*skipped, event]
        skipped.clear()


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    """By collective of `graph` that is waited for in it, the number of its wait, from 1 on."""
    waits = graph.find_nodes(op="call_function", target=ops.wait)
    return {wait.args[0]: number for number, wait in enumerate(waits, 1)}


def _by_short_names(operators: dict[str, Any], lines: list[str]) -> list[str]:
    """`lines` of code with a short global name, which `operators` gets, for each operator of torch.

    Each call saves four look-ups and a Python call that way; see README.md (codegen.py).
    """

    def short_name(match: re.Match[str]) -> str:
        namespace, name, overload = match.groups()
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        call, label = call_of(operator), "_".join(match.groups())
        # Operators of two namespaces may have one label: the second keeps its whole name.
        return label if operators.setdefault(label, call) is call else match.group()

    return [_OPERATOR.sub(short_name, line) for line in lines]


def _bind(
    copied: fx.Node, node: fx.Node, bindings: Bindings, by_gathers: Collection[fx.Node]
) -> None:
    plan, group = bindings.plan, bindings.group
    if node.op == "placeholder":
        # fx writes node names in lower case but arguments unchanged: `b = B` would leave B
        # referring to a value that the code drops as b.
        copied.target = copied.name
    elif ops.is_collective(node):
        copied.target = _bound_collective(node, plan, group, by_gathers)
        copied.kwargs = {}
    elif node.target in (ops.accumulate_grad, ops.add_accumulated):
        bindings.accumulated.bind(copied)
    elif node.target is ops.check_finite:
        copied.target = probe_masked if Check.of_node(node).masked else probe
        copied.kwargs = {}
    elif node.target is ops.report_finite:
        bindings.reports.bind(copied, node)
    elif node.target in ops.RANDOM_STATES:
        bind_random_state(copied, group.device)
    elif ops.is_transfer(node):
        bind_transfer(copied, group.device)
    elif node.target is ops.reshard:
        arguments = OneTensor.of(node)
        ranks: Any = arguments.ranks
        layout = plan.layouts[str(arguments.param)].over(ranks)
        copied.target, copied.kwargs = Reshard(layout, group.within(ranks)), {}
    elif node.target in (ops.wait, ops.free):
        copied.target = wait if node.target is ops.wait else free


def _last(region: Region) -> fx.Node:
    """The last operator of `region`: the region runs in its place, after all its inputs."""
    return [node for node in region.nodes if picks_from(node) is None][-1]


def _call_region(
    lowered: fx.Graph, region: Region, forms: Forms, table: Regions, new: dict[fx.Node, Any]
) -> None:
    """Add to `lowered` the call of `region`, and the nodes that pick its results.

    The operands are packed in a list before the call. The region empties the list, so it holds the
    last references to operands that are not used afterwards.
    """
    phase = region.nodes[0].meta["phase"]
    operands = tuple(new[node] for node in region.inputs)
    packed = lowered.create_node("call_function", pack, operands, name=f"pack_{region.number}")
    call = lowered.create_node(
        "call_function", forms.call(region, table), (packed,), name=f"region_{region.number}"
    )
    packed.meta["phase"] = call.meta["phase"] = phase
    for node in region.nodes:
        if is_fixed(node.meta.get("val")):
            new[node] = node.meta.get("val")
    for index, node in enumerate(region.outputs):
        picked = lowered.create_node(
            "call_function", operator.getitem, (call, index), name=node.name
        )
        picked.meta = dict(node.meta)
        new[node] = picked


def _left_to_gathers(graph: fx.Graph, group: Group) -> set[fx.Node]:
    """The arrivals and casts of shards that gathers over several ranks do themselves.

    So compute does not wait for them, and casts need no memory of their own.
    """
    found = set()
    for node in graph.nodes:
        gather = done_by_gather(node)
        if gather is not None and _ranks_of(Collective.of(gather), group).size > 1:
            found.add(node)
    return found


def _ranks_of(collective: Collective, group: Group) -> Group:
    if collective.ranks is not None:
        return group.within(collective.ranks)
    return group.named(collective.group)


def _bound_collective(
    node: fx.Node, plan: ShardingPlan, group: Group, by_gathers: Collection[fx.Node]
) -> BoundCollective:
    collective = Collective.of(node)
    layouts = [plan.layouts[name] for name in collective.params]
    by_caller = group.replica_all_reduce if collective.group == ops.REPLICATE else None
    if collective.ranks is not None:
        layouts = [layout.over(collective.ranks) for layout in layouts]
    group = _ranks_of(collective, group)
    op, unit, phase = collective.op, collective.unit, node.meta["phase"]
    own = reduced_in_place(node, group.backend) if by_caller is None else frozenset()
    operands = [
        Operand(
            layout,
            value.meta["val"].dtype,
            temporary=op.gathers and value.target is ops.cast and value not in by_gathers,
            casts=value.target is ops.cast and value in by_gathers,
            own=index in own,
        )
        for index, (layout, value) in enumerate(zip(layouts, operands_of(node), strict=True))
    ]
    if by_caller is not None:
        return AllReduceByCaller(group, unit, phase, operands, by_caller)
    if group.size == 1 and op.reduces:
        return LocalReduce(op.name, group, unit, phase)
    kind: Any = kind_of(op, group, in_place=collective.in_place)
    return cast(BoundCollective, kind(group, unit, phase, operands))


def kind_of(op: ops.Op, group: Group, *, in_place: bool = False) -> type[BoundCollective]:
    """The class that runs a collective over `group`, of at least two ranks for a reduce.

    A gather in place writes into the buffers of resident parameters.
    """
    if op.gathers and group.size == 1:
        return LocalGather
    if op.gathers:
        return AllGatherInPlace if in_place else AllGather
    if op.target is ops.reduce_scatter and group.backend == "gloo":
        return ReduceScatterByPairExchange if group.size == 2 else ReduceScatterByExchange
    return REDUCES[op.target]


# -- random numbers -------------------------------------------------------------------------------

Generator = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that read and set the state of a generator; neither waits for the device."""


def generators_of(device: torch.device) -> list[Generator]:
    """Those a program for `device` may draw from: the CPU's, the device's if another, numpy's."""
    generators = [_generator(kind, device) for kind in dict.fromkeys(("cpu", device.type))]
    if numpy := sys.modules.get("numpy"):
        generators.append((numpy.random.get_state, numpy.random.set_state))
    return generators


def _generator(kind: str, device: torch.device) -> Generator:
    """The default generator of a type of device; on CUDA it is that of `device`, the rank's."""
    if kind == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    return (
        lambda: torch.cuda.get_rng_state(device),
        lambda state: torch.cuda.set_rng_state(state, device),
    )


def bind_random_state(copied: fx.Node, device: torch.device) -> None:
    """Make `copied`, a `save_random_state` or `set_random_state`, the call that does it."""
    name = copied.target.__name__  # type: ignore[union-attr]
    get, put = _generator(str(copied.kwargs["device"]), device)

    def save() -> Tensor:
        return get()

    def exchange(state: Tensor) -> Tensor:
        present = get()
        put(state)
        return present

    function: Any = save if copied.target is ops.save_random_state else exchange
    function.__name__ = function.__qualname__ = name
    function.__module__ = "graphshard"  # fx prints a call by these
    copied.target, copied.kwargs = function, {}


@contextlib.contextmanager
def put_back_on_error(devices: frozenset[str], device: torch.device) -> Iterator[None]:
    """Put the generators of the device types back if the body fails between two of its draws."""
    generators = [_generator(kind, device) for kind in devices]
    states = [get() for get, _ in generators]
    try:
        yield
    except BaseException:
        for (_, put), state in zip(generators, states, strict=True):
            put(state)
        raise
