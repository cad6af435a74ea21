"""Lowering: one half of a program becomes Python that ranks run.

Vocabulary nodes turn into calls of their unit's bound collectives, so a step looks nothing up, and
the generated code reads

    all_gather = blocks_0_all_gather([p_blocks_0_weight, p_blocks_0_bias]);
    wait = graphshard_wait(all_gather);
    mm = aten_mm_default(view, t);

where `aten_mm_default` is what `torch.ops.aten.mm.default` calls, or what calls the same kernels
for less (see `operator_calls`), found once and not at each step.

Arguments come in one list, which the code empties: so nothing but the code itself keeps a saved
activation alive, and it is gone after its last use. The same holds of a region, which is one call:

    pack_4 = graphshard_pack(wait_full, linear);
    region_4 = graphshard_region_4(pack_4);

A parameter that is released in a region is taken out of the gather's list when it is picked from
it, so that the region's operands are the last to hold it:

    weight_full = graphshard_take(wait, 0);
    pack_4 = graphshard_pack(weight_full, linear);  weight_full = linear = None
"""

from __future__ import annotations

import operator
import re
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.annotations import Regions
from graphshard.program.collective import Collective as CollectiveArguments
from graphshard.program.collective import OneTensor, operands_of
from graphshard.program.program import copy_node
from graphshard.program.regions import Region, is_fixed, picks_from, regions_in
from graphshard.runtime.accumulated import AccumulatedGrads
from graphshard.runtime.codegen import BoxedCodeGen, call_of
from graphshard.runtime.collectives import Collective, Operand, wait
from graphshard.runtime.gather import (
    AllGather,
    AllGatherInPlace,
    LocalGather,
    Reshard,
    free,
    poison,
    releasing,
    take,
)
from graphshard.runtime.group import Group
from graphshard.runtime.host_copies import bind_transfer
from graphshard.runtime.reduce import LocalReduce, reduce_kind
from graphshard.runtime.region import Forms, pack

# At the start of a call: an operator may be named inside of a string, too.
_OPERATOR = re.compile(r"(?<== )torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def lower(
    graph: fx.Graph,
    plan: ShardingPlan,
    group: Group,
    kept: AccumulatedGrads,
    forms: Forms,
    table: Regions | None = None,
) -> fx.GraphModule:
    """`graph`, half of a program, bound to `group` and `kept`: call `.forward(all_arguments)`.

    Args:
        graph: half of a program.
        plan: the program's.
        group: the ranks.
        kept: this rank's kept gradients.
        forms: of the regions that were compiled so far.
        table: the program's regions, each of which becomes one call. None: it has none.
    """
    lowered = fx.Graph()
    new: dict[fx.Node, Any] = {}
    regions = regions_in(graph) if table is not None else []
    inside = {node for region in regions for node in (*region.nodes, *region.releases)}
    taken = {node.args[0] for region in regions for node in region.releases}
    ends = {_last(region): region for region in regions}
    for node in graph.nodes:
        if node in ends:
            assert table is not None
            _call_region(lowered, ends[node], forms, table, new)
            if group.check:
                for release in ends[node].releases:
                    poisoned = lowered.node_copy(release, new.__getitem__)
                    poisoned.target = poison
        elif node not in inside:
            copied = new[node] = copy_node(lowered, node, new)
            _bind(copied, node, plan, group, kept)
            if node in taken and not group.check:
                copied.target = take
            if node.target is ops.release:
                gather: Any = new[ops.released(node)[0]].target
                copied.target = releasing(gather)
    lowered.set_codegen(BoxedCodeGen())
    operators: dict[str, Any] = {}
    lowered.on_generate_code(lambda _: partial(_by_short_names, operators))
    module = fx.GraphModule(nn.Module(), lowered)
    run: Any = type(module).forward
    run.__globals__.update(operators)
    return module


def _by_short_names(operators: dict[str, Any], lines: list[str]) -> list[str]:
    """`lines` of code with one name for each of torch's operators, which it gets in `operators`.

    Four look-ups and a call in Python less for each: a quarter of what calling one costs.
    """

    def short(found: re.Match[str]) -> str:
        namespace, name, overload = found.groups()
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        call, label = call_of(operator), "_".join(found.groups())
        # One of another namespace may have the same label: it keeps its whole name.
        return label if operators.setdefault(label, call) is call else found.group()

    return [_OPERATOR.sub(short, line) for line in lines]


def _bind(
    copied: fx.Node, node: fx.Node, plan: ShardingPlan, group: Group, kept: AccumulatedGrads
) -> None:
    """Let `copied`, a copy of `node`, call what does on a rank what `node` says."""
    if node.op == "placeholder":
        # fx writes names in lower case and arguments as they are given: `b = B` would leave B
        # referring to what the code drops as b.
        copied.target = copied.name
    elif ops.is_collective(node):
        copied.target = _bound(node, plan, group)
        copied.kwargs = {}
    elif node.target in (ops.keep, ops.add_kept):
        kept.bind(copied)
    elif ops.is_transfer(node):
        bind_transfer(copied, group)
    elif node.target is ops.reshard:
        taken = OneTensor.of(node)
        ranks: Any = taken.ranks
        layout = plan.layouts[str(taken.param)].over(ranks)
        copied.target, copied.kwargs = Reshard(layout, group.within(ranks)), {}
    elif node.target is ops.wait:
        copied.target = wait
    elif node.target is ops.free:
        copied.target = free


def _last(region: Region) -> fx.Node:
    """Where `region` runs: at its last operator, behind all that it reads."""
    return [node for node in region.nodes if picks_from(node) is None][-1]


def _call_region(
    lowered: fx.Graph, region: Region, forms: Forms, table: Regions, new: dict[fx.Node, Any]
) -> None:
    """Call `region`, and pick out what is read outside of it.

    Its operands go in a list that is made before, so that the region, which empties it, is the last
    to hold what is not used after it.
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


def _bound(node: fx.Node, plan: ShardingPlan, group: Group) -> Collective:
    collective = CollectiveArguments.of(node)
    layouts = [plan.layouts[name] for name in collective.params]
    if collective.columns is not None:
        layouts = [layout.columns(*collective.columns) for layout in layouts]
    if collective.ranks is not None:
        layouts = [layout.over(collective.ranks) for layout in layouts]
        group = group.within(collective.ranks)
    else:
        group = group.named(collective.group)
    op, unit, phase = collective.op, collective.unit, node.meta["phase"]
    operands = [
        Operand(layout, value.meta["val"].dtype, made=op.gathers and value.target is ops.cast)
        for layout, value in zip(layouts, operands_of(node), strict=True)
    ]
    if group.size == 1 and op.reduces:
        return LocalReduce(op.name, group, unit, phase)
    kind = kind_of(op, group, in_place=collective.in_place)
    return kind(group, unit, phase, operands)


def kind_of(op: ops.Op, group: Group, *, in_place: bool = False) -> type[Collective]:
    """The class that runs a collective over `group`, of more than one rank to reduce.

    Args:
        op: the collective's row of the vocabulary.
        group: the ranks.
        in_place: the results of a gather are copies that ranks keep.
    """
    if op.reduces:
        return reduce_kind(op, group)
    if group.size == 1:
        return LocalGather
    return AllGatherInPlace if in_place else AllGather
