"""Rule on sums: a gradient that ranks add up is that of tangents divided by the ranks."""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.collective import Collective
from graphshard.program.gradient_scales import GradientScales, NotScaledError, scaled_by_mark
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import SCALE, signature
from graphshard.verify.facts import Facts


def check_scales(facts: Facts) -> None:
    """Every gradient is returned once over, whatever tangents are divided by and reduces add up.

    Value numbers take a scale for its operand; this rule checks the factors. From `Stage.SUMMED`
    on, reduces add up or average as the plan says.
    """
    reduces = [node for node in facts.collectives if node.target in ops.REDUCES]
    summed = Stage.SUMMED in facts.done and facts.plan.summed_ranks > 1
    if Stage.SUMMED in facts.done:
        for node in reduces:
            _check_operator(facts, node)
    sums = summed or any(Collective.of(node).reduce_op == ops.SUM for node in reduces)
    if not sums and not any(SCALE in node.meta for node in facts.nodes):
        return
    for node in facts.nodes:
        if SCALE in node.meta:
            _check_value(facts, node)
    try:
        scales = GradientScales.find(facts.program, facts.plan)
    except NotScaledError as error:
        facts.fail("scales", error.node, error.text)
    results, program = facts.program.results(), facts.program
    ends = [(entry.fqn, grad) for entry, grad in zip(program.params, results.grads, strict=True)]
    ends += [(e.path, grad) for e, grad in zip(program.inputs, results.input_grads, strict=True)]
    for name, grad in ends:
        factor = scales.factor(grad) if isinstance(grad, fx.Node) else None
        if factor not in (None, 1):
            facts.fail("scales", grad, f"the gradient of {name!r} is {factor} times what it was")


def _check_value(facts: Facts, scale: fx.Node) -> None:
    source = scaled_by_mark(scale)
    if source is None:
        return
    is_of, expected = (signature(node.meta["val"]) for node in (scale, source))
    if is_of != expected:
        facts.fail("shapes", scale, f"it is {is_of}, and must be {expected}")


def _check_operator(facts: Facts, reduce: fx.Node) -> None:
    arguments = Collective.of(reduce)
    by_caller = arguments.group == ops.REPLICATE and facts.plan.replica_all_reduce
    planned = ops.SUM if facts.plan.summed_ranks > 1 and not by_caller else ops.AVG
    if arguments.reduce_op != planned:
        facts.fail(
            "scales", reduce, f"its operator is {arguments.reduce_op!r}, and the plan's {planned!r}"
        )
