"""Rule on mixed precision: parameters and gradients move in the dtypes that the plan says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphshard.planning.layout import ParamLayout
from graphshard.program import ops
from graphshard.program.collective import operands_of, param_of, params_of
from graphshard.verify.facts import Facts

Move = tuple[fx.Node, fx.Node, str, torch.dtype]
"""A node, the value that it moves, the words for that in an error, and the dtype planned."""


def check_precision(facts: Facts) -> None:
    """Parameters are gathered, and gradients reduced, kept and returned, in their layout's dtypes.

    `check_values` lets casts of a gradient move to another place than the captured one; this rule
    checks the dtypes that they cast to.
    """
    for node, moved, text, dtype in _moves(facts):
        if moved.meta["val"].dtype != dtype:
            facts.fail(
                "precision",
                node,
                f"{text} in {moved.meta['val'].dtype}, and the plan says {dtype}",
            )


def _moves(facts: Facts) -> Iterator[Move]:
    layouts = facts.plan.layouts
    for node in facts.nodes:
        if node.target in (ops.accumulate_grad, ops.add_accumulated):
            param = str(param_of(node))
            if getattr(node.args[0], "target", None) is ops.cast:
                facts.fail(
                    "precision",
                    node,
                    f"it takes the gradient of {param!r} cast, and the sum is to be rounded alone",
                )
            yield node, node, f"it accumulates {param!r}", layouts[param].reduce_dtype
        if ops.is_collective(node):
            for operand, param in zip(operands_of(node), params_of(node), strict=True):
                yield node, operand, f"it moves {param!r}", _in_transit(node, layouts[param])
    for entry, end in zip(facts.program.params, facts.program.results().grads, strict=True):
        if isinstance(end, fx.Node):
            text = f"the gradient of {entry.fqn!r} is returned"
            yield end, end, text, layouts[entry.fqn].grad_dtype


def _in_transit(collective: fx.Node, layout: ParamLayout) -> torch.dtype:
    gathers = collective.target is ops.all_gather
    return layout.compute_dtype if gathers else layout.reduce_dtype
