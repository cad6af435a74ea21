"""Rule on kept gradients: what a program keeps for a later micro-batch, and what it takes."""

from __future__ import annotations

from torch import fx

from graphshard import ops
from graphshard.verify_facts import Facts, signature


def check_kept(facts: Facts) -> None:
    """What is kept is a parameter's gradient as its reduce would take it, and all are or none.

    Where shards are kept, the gradients of replicated parameters are reduced all the same.
    """
    kept: dict[str, fx.Node] = {}
    for node in facts.nodes:
        if node.target not in (ops.keep, ops.add_kept):
            continue
        param, of = node.kwargs.get("param"), node.kwargs.get("of")
        known = isinstance(param, str) and param in facts.params
        if not known or node.kwargs.get("unit") != facts.plan.unit_of_param(str(param)):
            facts.fail("operands", node, "it must say its parameter, and that one's unit")
        layout = facts.plan.layouts[str(param)]
        shape = {"gradient": layout.shape, "shard": layout.shard_shape}.get(str(of))
        if len(node.args) != 1 or signature(node.args[0].meta["val"])[0] != shape:  # type: ignore
            facts.fail("kept", node, f"its operand is no {of!r} of {param!r}, of shape {shape}")
        if node.target is ops.keep:
            if str(param) in kept:
                facts.fail("kept", node, f"%{kept[str(param)].name} keeps {param!r} already")
            kept[str(param)] = node
    for entry, grad in zip(facts.program.params, facts.program.results().grads, strict=True):
        sharded = facts.plan.layouts[entry.fqn].sharded
        whole = any(node.kwargs["of"] == "gradient" for node in kept.values())
        if kept and grad is not None and not entry.ignored and (whole or sharded):
            facts.fail(
                "kept",
                grad,
                f"the gradient of {entry.fqn!r} is returned, but those of others are kept",
            )
