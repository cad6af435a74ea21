"""The nodes of a recomputed region, and how some of them are issued again in backward.

A region is one call of a module, or one call of `torch.utils.checkpoint`. A node belongs to the
checkpoints around it, or else to the innermost call of a target module around it. Checkpoints nest
as in torch: the inner region is recomputed for the backward of the outer one and once more for its
own. A checkpoint inside the call of a target is a separate region from the rest of that call, so no
operator is recomputed by both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.capture.annotation import CALLS, KEEP, REGION
from graphshard.program.ops import is_random, writes
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, Program

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


def plan_issues(reads: Reads, again: NodePredicate, order: Mapping[fx.Node, int]) -> list[Issue]:
    """Place each recomputed node right before the first backward node that needs it.

    Args:
        reads: the reads of the region.
        again: whether to recompute a forward node; all others are saved.
        order: places of the forward nodes.
    """
    placed: set[fx.Node] = set()
    issues: list[Issue] = []
    for user, values in reads.by_user.items():
        needed: list[fx.Node] = []
        stack = [value for value in values if again(value)]
        while stack:
            node = stack.pop()
            if node in placed:
                continue
            placed.add(node)
            needed.append(node)
            stack.extend(source for source in sources(node) if again(source))
        if needed:
            issues.append((user, sorted(needed, key=order.__getitem__)))
    return issues


def issue_again(graph: fx.Graph, reads: Reads, issues: Iterable[Issue]) -> dict[fx.Node, fx.Node]:
    """Insert the copies that `issues` places, let backward read them, and return them by node."""
    copies: dict[fx.Node, fx.Node] = {}
    for user, nodes in issues:
        with graph.inserting_before(user):
            for node in nodes:
                copies[node] = _copy(graph, node, copies)
    for user, values in reads.by_user.items():
        for value in values:
            if value in copies:
                user.replace_input_with(value, copies[value])
    return copies


# -- single nodes ---------------------------------------------------------------------------------


def recomputable(node: fx.Node) -> bool:
    """Whether `node` computes the same when issued again: no random draw, no write, no number.

    The output of a dropout can be recomputed from its mask, which stays saved.
    """
    if node.op != "call_function" or node.meta["phase"] != FORWARD or writes(node):
        return False
    val = node.meta.get("val")
    if not isinstance(val, (Tensor, tuple, list)):
        return False  # a size needs no memory, but recomputing it would save its tensor
    return not _is_random_result(node)


def saved_by_model(node: fx.Node) -> bool:
    """Whether a selective checkpoint in the model saves `node`."""
    return bool(node.meta.get(KEEP, False))


def dropout_of(node: fx.Node) -> fx.Node | None:
    """The dropout whose output (not its mask) `node` selects; None if there is none."""
    if node.target is getitem and node.args[1] == 0:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is _aten.native_dropout.default:
            return source if len(source.args) == 3 and source.args[2] is True else None
    return None


def mask_of(dropout: fx.Node) -> fx.Node | None:
    """The node that selects the mask of `dropout`; None if there is none."""
    return next((u for u in dropout.users if u.target is getitem and u.args[1] == 1), None)


def sources(node: fx.Node) -> list[fx.Node]:
    """The values that recomputing `node` reads, without the mask of a dropout."""
    dropout = dropout_of(node)
    return node.all_input_nodes if dropout is None else dropout.all_input_nodes


def _is_random_result(node: fx.Node) -> bool:
    """Whether `node` draws random numbers or selects such a result, except a dropout's output."""
    if dropout_of(node) is not None:
        return False
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_random(source)
    return is_random(node)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    dropout = dropout_of(node)
    if dropout is None:
        copy = graph.node_copy(node, lambda source: copies.get(source, source))
    else:
        value, p, _ = dropout.args
        assert isinstance(value, fx.Node)
        assert isinstance(p, float | int)
        # A dropout's output is its input times mask times scale, as its backward computes it from a
        # gradient. So only the mask is saved, one byte an element.
        mask = mask_of(dropout) or _new_mask(graph, dropout)
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        copy = graph.call_function(
            _aten.native_dropout_backward.default, (copies.get(value, value), mask, scale)
        )
    copy.meta = {**node.meta, "phase": BACKWARD, RECOMPUTED: True}
    return copy


def _new_mask(graph: fx.Graph, dropout: fx.Node) -> fx.Node:
    with graph.inserting_after(dropout):
        mask = graph.call_function(getitem, (dropout, 1))
    mask.meta = {**dropout.meta, "val": dropout.meta["val"][1]}
    return mask
