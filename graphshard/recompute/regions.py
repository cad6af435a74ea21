"""The nodes of a recomputed region, and how some of them are issued again in backward.

A region is one call of a module, or one call of `torch.utils.checkpoint`. A node belongs to the
checkpoints around it, or else to the innermost call of a target module around it. Checkpoints nest
as in torch: the inner region is recomputed for the backward of the outer one and once more for its
own. A checkpoint inside the call of a target is a separate region from the rest of that call, so no
operator is recomputed by both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.capture.annotation import CALLS, KEEP, REGION
from graphshard.program.aliases import storage_root
from graphshard.program.ops import is_compute, is_transfer, writes
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, REPLAYS, Program
from graphshard.program.size_nodes import as_arguments
from graphshard.program.sizes import is_contiguous
from graphshard.torch_private.random_ops import may_draw, may_move_generators

_aten = torch.ops.aten


_COMPUTE_INTENSIVE = """
    mm addmm bmm baddbmm addbmm matmul linear mv addmv dot _scaled_mm _grouped_mm _scaled_grouped_mm
    convolution _convolution
    scaled_dot_product_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math _flash_attention_forward _efficient_attention_forward
    _cudnn_attention_forward
"""


@cache
def compute_intensive_packets() -> frozenset[Any]:
    """The operators (overload packets) saved by selective recomputation, if this torch has them."""
    return frozenset(
        getattr(_aten, name) for name in _COMPUTE_INTENSIVE.split() if hasattr(_aten, name)
    )


def is_compute_intensive(node: fx.Node) -> bool:
    """Whether `node` is a matrix product, a convolution or attention, or selects its result."""
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return getattr(node.target, "overloadpacket", None) in compute_intensive_packets()


Region = Hashable


NodePredicate = Callable[[fx.Node], bool]


Issue = tuple[fx.Node, list[fx.Node]]
"""A backward node, and the forward nodes to recompute right before it, in order."""


def checkpoints(node: fx.Node) -> tuple[Region, ...]:
    """The calls of `torch.utils.checkpoint` around `node`, the outermost first."""
    return tuple(node.meta.get(REGION, ()))


def call_of(node: fx.Node, targets: Collection[str]) -> Region | None:
    """The innermost call of a module in `targets` around `node`."""
    calls = node.meta.get(CALLS)
    if calls is None:  # a node of autograd between modules, or one inserted by hand
        fqn = node.meta.get("fqn", "")
        while fqn and fqn not in targets:
            fqn = fqn.rpartition(".")[0]
        return (fqn, None) if fqn in targets else None
    return next((call for call in reversed(calls) if call[0] in targets), None)


@dataclass(frozen=True)
class Reads:
    """The forward values of one region that each backward node reads."""

    region: Region
    by_user: Mapping[fx.Node, list[fx.Node]]


def reads_of_checkpoints(program: Program, depth: int) -> Iterator[Reads]:
    """Reads of the checkpoints at nesting `depth` by backward, recomputed nodes included."""

    def region(node: fx.Node) -> Region | None:
        chain = checkpoints(node)
        return chain[depth] if len(chain) > depth else None

    return _reads(program, region, region)


def reads_of_calls(program: Program, targets: Collection[str]) -> Iterator[Reads]:
    """Reads of the calls of `targets` by backward, recomputed nodes included."""

    def value_region(node: fx.Node) -> Region | None:
        return None if checkpoints(node) else call_of(node, targets)

    return _reads(program, lambda user: call_of(user, targets), value_region)


def _reads(
    program: Program,
    user_region: Callable[[fx.Node], Region | None],
    value_region: Callable[[fx.Node], Region | None],
) -> Iterator[Reads]:
    """The reads of each region; the functions give the region of a backward node and of a value."""
    by_region: dict[Region, dict[fx.Node, list[fx.Node]]] = defaultdict(dict)
    for user in program.nodes(BACKWARD):
        region = user_region(user)
        if region is None:
            continue
        values = [
            value
            for value in user.all_input_nodes
            if value.op == "call_function"
            and value.meta["phase"] == FORWARD
            and value_region(value) == region
        ]
        if values:
            by_region[region][user] = values
    for region, by_user in by_region.items():
        yield Reads(region, by_user)


def checkpoint_depth(program: Program) -> int:
    """The deepest nesting of checkpoints in `program`; 0 if there are none."""
    return max((len(checkpoints(node)) for node in program.nodes(FORWARD)), default=0)


@dataclass(frozen=True)
class Issues:
    """The nodes that are issued again, and how.

    `before` has the nodes to recompute before each backward node, in the order of the graph;
    `again` says whether a node is recomputed. Only the mask is drawn again of the dropouts in
    `masks_alone`: its numbers do not depend on the values that are dropped, so zeros stand in for
    these.
    """

    before: list[Issue]
    again: NodePredicate
    masks_alone: frozenset[fx.Node]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The values that recomputing `node` reads, without the saved mask of a dropout."""
        return [] if node in self.masks_alone else sources(node, self.again)


def plan_issues(reads: Reads, again: NodePredicate, order: Mapping[fx.Node, int]) -> Issues:
    """Place each recomputed node right before the first backward node that needs it.

    `again` says which forward nodes are recomputed; all others are saved.
    """
    issues = Issues([], again, _masks_alone(reads, again))
    placed: set[fx.Node] = set()
    for user, values in reads.by_user.items():
        needed: list[fx.Node] = []
        stack = [value for value in values if again(value)]
        while stack:
            node = stack.pop()
            if node in placed:
                continue
            placed.add(node)
            needed.append(node)
            stack.extend(source for source in issues.sources(node) if again(source))
        if needed:
            issues.before.append((user, sorted(needed, key=order.__getitem__)))
    return issues


def _masks_alone(reads: Reads, again: NodePredicate) -> frozenset[fx.Node]:
    """The dropouts of which backward needs the mask again, but not the output."""
    alone: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [value for values in reads.by_user.values() for value in values if again(value)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        dropout = _picked_dropout(node, 1)
        if dropout is not None and again(dropout) and mask_needs_no_operand(dropout):
            alone.add(dropout)
        else:
            stack.extend(source for source in sources(node, again) if again(source))
    return frozenset(alone - seen)


def mask_needs_no_operand(dropout: fx.Node) -> bool:
    """Whether zeros of the operand's shape give the same mask of `dropout`.

    Numbers are drawn in the order of memory, on CUDA by threads whose share depends on whether the
    operand can be read in whole vectors of 16 bytes. So it can where an operator allocated it; what
    is given to the program may begin anywhere.
    """
    source = dropout.args[0]
    assert isinstance(source, fx.Node)
    root = storage_root(source)
    if not is_compute(root) and not is_transfer(root):
        return False
    operand = source.meta["val"]
    offset = operand.storage_offset()
    aligned = type(offset) is int and offset * operand.dtype.itemsize % 16 == 0
    return aligned and is_contiguous(operand)


def issue_again(program: Program, reads: Reads, issues: Issues) -> dict[fx.Node, fx.Node]:
    """Insert the copies that `issues` places, let backward read them, and return them by node."""
    copies: dict[fx.Node, fx.Node] = {}
    for user, nodes in issues.before:
        with program.graph.inserting_before(user):
            for node in nodes:
                copies[node] = _copy(program, node, copies, issues)
    for user, values in reads.by_user.items():
        for value in values:
            if value in copies:
                user.replace_input_with(value, copies[value])
    return copies


# -- single nodes ---------------------------------------------------------------------------------


def recomputable(node: fx.Node, redrawn: Container[fx.Node] = ()) -> bool:
    """Whether `node` computes the same when issued again: no write, no number, no random draw.

    The output of a dropout can be recomputed from its mask, which stays saved. `redrawn` are the
    draws that backward repeats; see `graphshard.recompute.redraw`.
    """
    if node.op != "call_function" or node.meta["phase"] != FORWARD or writes(node):
        return False
    val = node.meta.get("val")
    if not isinstance(val, (Tensor, tuple, list)):
        return False  # a size needs no memory, but recomputing it would save its tensor
    draw = _draw_of(node)
    return draw is None or draw in redrawn or dropout_of(node) is not None


def saved_by_model(node: fx.Node) -> bool:
    """Whether a selective checkpoint in the model saves `node`."""
    return bool(node.meta.get(KEEP, False))


def is_dropout(node: fx.Node) -> bool:
    """Whether `node` is a dropout in training, which gives an output and a mask."""
    return (
        node.target is _aten.native_dropout.default and len(node.args) == 3 and node.args[2] is True
    )


def dropout_of(node: fx.Node) -> fx.Node | None:
    """The dropout whose output (not its mask) `node` selects; None if there is none."""
    return _picked_dropout(node, 0)


def _picked_dropout(node: fx.Node, index: int) -> fx.Node | None:
    if node.target is getitem and node.args[1] == index:
        source = node.args[0]
        if isinstance(source, fx.Node) and is_dropout(source):
            return source
    return None


def mask_of(dropout: fx.Node) -> fx.Node | None:
    """The node that selects the mask of `dropout`; None if there is none."""
    return next((u for u in dropout.users if u.target is getitem and u.args[1] == 1), None)


def redrawn_for(node: fx.Node) -> fx.Node | None:
    """The dropout to repeat for `node`: that whose mask it selects; None for other nodes.

    If nothing selects the mask, it is that whose output it selects.
    """
    dropout = dropout_of(node)
    if dropout is not None and mask_of(dropout) is None:
        return dropout
    return _picked_dropout(node, 1)


def sources(node: fx.Node, again: NodePredicate) -> list[fx.Node]:
    """The values that recomputing `node` reads, without the saved mask of a dropout.

    `again` says whether a node is recomputed.
    """
    dropout = dropout_of(node)
    if dropout is None or again(dropout):
        return node.all_input_nodes
    return dropout.all_input_nodes


def _draw_of(node: fx.Node) -> fx.Node | None:
    """The operator that may draw random numbers, if `node` is it or selects a result of it."""
    source = node.args[0] if node.target is getitem else node
    return source if isinstance(source, fx.Node) and may_draw(source) else None


def _copy(
    program: Program, node: fx.Node, copies: Mapping[fx.Node, fx.Node], issues: Issues
) -> fx.Node:
    dropout = dropout_of(node)
    if node in issues.masks_alone:
        copy = program.graph.node_copy(node)
        copy.args = (_stand_in(program, copy), *node.args[1:])
    elif dropout is None or issues.again(dropout):
        copy = program.graph.node_copy(node, lambda source: copies.get(source, source))
    else:
        copy = _masked(program.graph, dropout, copies)
    copy.meta = {**node.meta, "phase": BACKWARD, RECOMPUTED: True}
    if may_move_generators(node):
        copy.meta[REPLAYS] = node.name
    return copy


def _masked(graph: fx.Graph, dropout: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The output of `dropout`: its operand times mask times scale.

    So its backward computes it from a gradient. Only the mask is saved, one byte an element.
    """
    value, p, _ = dropout.args
    assert isinstance(value, fx.Node)
    assert isinstance(p, float | int)
    mask = mask_of(dropout) or _new_mask(graph, dropout)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return graph.call_function(
        _aten.native_dropout_backward.default, (copies.get(value, value), mask, scale)
    )


def _stand_in(program: Program, dropout: fx.Node) -> fx.Node:
    """Zeros like the operand of `dropout`, inserted before it."""
    operand = dropout.args[0]
    assert isinstance(operand, fx.Node)
    val: Tensor = operand.meta["val"]
    place = {"unit": operand.meta.get("unit", ""), "phase": BACKWARD}
    with program.graph.inserting_before(dropout):
        zeros = program.graph.call_function(
            _aten.zeros.default,
            (as_arguments(program, val.shape, **place),),
            {"dtype": val.dtype, "device": val.device},
        )
    zeros.meta = {**dropout.meta, "phase": BACKWARD, "val": val, RECOMPUTED: True}
    return zeros


def _new_mask(graph: fx.Graph, dropout: fx.Node) -> fx.Node:
    with graph.inserting_after(dropout):
        mask = graph.call_function(getitem, (dropout, 1))
    mask.meta = {**dropout.meta, "val": dropout.meta["val"][1]}
    return mask
