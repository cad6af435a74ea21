"""Rule on mixed precision: parameters and gradients move in the dtypes that the plan says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphshard.planning.layout import ParamLayout
from graphshard.program import ops
from graphshard.program.collective import operands_of, param_of, params_of
from graphshard.verify.facts import Facts

Move = tuple[fx.Node, fx.Node, str, torch.dtype]  # the node, what it moves, how to say it, in what


def check_precision(facts: Facts) -> None:
    """What is gathered, reduced, kept and returned of a parameter is in its layout's dtypes.

    The rule on values lets a gradient be rounded elsewhere than when captured (`Precision` moves
    the casts of one); this one says to what.
    """
    for node, moved, what, wanted in _moves(facts):
        if moved.meta["val"].dtype != wanted:
            facts.fail(
                "precision",
                node,
                f"{what} in {moved.meta['val'].dtype}, and the plan says {wanted}",
            )


def _moves(facts: Facts) -> Iterator[Move]:
    layouts = facts.plan.layouts
    for node in facts.nodes:
        if node.target in (ops.keep, ops.add_kept):
            param = str(param_of(node))
            grad: fx.Node = node.args[0]  # type: ignore[assignment]
            yield node, grad, f"it takes the gradient of {param!r}", layouts[param].reduce_dtype
        if ops.is_collective(node):
            for operand, param in zip(operands_of(node), params_of(node), strict=True):
                yield node, operand, f"it moves {param!r}", _in_transit(node, layouts[param])
    for entry, end in zip(facts.program.params, facts.program.results().grads, strict=True):
        if isinstance(end, fx.Node):
            told = f"the gradient of {entry.fqn!r} is returned"
            yield end, end, told, layouts[entry.fqn].grad_dtype


def _in_transit(collective: fx.Node, layout: ParamLayout) -> torch.dtype:
    gathers = collective.target is ops.all_gather
    return layout.compute_dtype if gathers else layout.reduce_dtype
