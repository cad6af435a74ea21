"""The rule that a rewritten program returns the values of the captured one."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NoReturn

from torch import fx

from graphshard.program import ops
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import REPLAYS
from graphshard.verify.facts import Facts
from graphshard.verify.numbering import Values


def check_values(facts: Facts) -> None:
    """Check that the step returns the captured values.

    Gradients may be reduced, accumulated, or cast as the plan says. Values are compared by their
    numbers; see `graphshard.verify.numbering`. From `Stage.CAST` on, a gradient may be cast for its
    reduce. From `Stage.ACCUMULATED` on, zeros may replace a missing gradient only where an
    accumulated one is added to them, or the policy has `gather_unused`.
    """
    captured = None if facts.reference is None else facts.reference.values
    if captured is None:
        return
    values = Values.of(facts.program, captured)
    _check_effects(facts, captured, values)
    program, results = facts.program, facts.program.results()
    zeros_need_sum = Stage.ACCUMULATED in facts.done and not facts.plan.policy.gather_unused
    for kind, ends, names in (
        ("output", results.outputs, [entry.path for entry in program.outputs]),
        ("mutation", results.mutations, [entry.name for entry in program.mutations]),
        ("grad", results.grads, [entry.fqn for entry in program.params]),
        ("input_grad", results.input_grads, [entry.path for entry in program.inputs]),
    ):
        for name, end, now, was in zip(
            names, ends, values.ends[f"{kind}s"], captured.ends[f"{kind}s"], strict=True
        ):
            recast = kind == "grad" and (
                Stage.CAST in facts.done and facts.plan.layouts[name].precision is not None
            )
            if now != was and (
                kind != "grad"
                or not values.explains(name, now, was, zeros_need_sum=zeros_need_sum, recast=recast)
            ):
                _blame(facts, captured, values, f"{kind} {name!r}", end, (now, was))


def _check_effects(facts: Facts, captured: Values, values: Values) -> None:
    for now, was in zip_longest(values.effects, captured.effects):
        if now is not was:
            name = "nothing" if now is None else f"%{now.name}"
            expected = "nothing" if was is None else f"%{was.name}"
            facts.fail(
                "same values",
                now or facts.program.output_node,
                f"{name} stands where {expected} did when captured; a pass may not add, drop or "
                "reorder nodes that draw random numbers or write into their operands",
            )
    for node in values.repeated:
        repeats = str(node.meta.get(REPLAYS))
        if captured.drawn.get(repeats) != values.drawn[node.name]:
            facts.fail(
                "same values",
                node,
                f"it draws other random numbers than %{repeats}, which it should draw again: it is "
                "another operator, or the generator is in another state",
            )


def _blame(
    facts: Facts, captured: Values, values: Values, result: str, end: Any, numbers: tuple[Any, Any]
) -> NoReturn:
    """Raise an error at the first node behind `end` that computes a value not captured."""
    captured_numbers = set(captured.of_node.values())
    for node in _behind(end, facts):
        if not ops.is_compute(node):
            continue
        number = values.of_node[node]
        if number in captured_numbers or values.name[number] != node.name:
            continue
        facts.fail(
            "same values",
            node,
            f"{result} differs from the captured program, as this node computes something new: "
            f"{_difference(node, captured, values)}",
        )
    now, was = numbers
    node = end if isinstance(end, fx.Node) else facts.program.output_node
    facts.fail(
        "same values",
        node,
        f"{result} is {values.text(now)}, and was {captured.text(was)} when captured",
    )


def _behind(end: Any, facts: Facts) -> list[fx.Node]:
    """`end` and all nodes that it depends on, in order."""
    nodes = {end} if isinstance(end, fx.Node) else set()
    stack = list(nodes)
    while stack:
        for value in stack.pop().all_input_nodes:
            if value not in nodes:
                nodes.add(value)
                stack.append(value)
    return sorted(nodes, key=facts.place.__getitem__)


def _difference(node: fx.Node, captured: Values, values: Values) -> str:
    was = captured.of_node.get(node)
    if was is None:
        return "the captured program has no such node"
    old, new = captured.keys[was], values.keys[values.of_node[node]]
    if old[0] is not new[0]:
        return "it is another operator"
    for index, (before, now) in enumerate(zip_longest(old[1], new[1], fillvalue=())):
        if before != now:
            return f"its operand {index} is {values.text(now)}, and was {captured.text(before)}"
    return "its keyword arguments differ"
