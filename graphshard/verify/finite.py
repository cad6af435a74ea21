"""Rule on checks for NaN and infinity: they look, they are reported once, and change nothing."""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.collective import operands_of
from graphshard.program.finite import Check, final_gradients, is_floating, values_of
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import BACKWARD, FORWARD
from graphshard.program.storages import END
from graphshard.verify.facts import Facts

_PHASES = {ops.OUTPUTS: FORWARD, ops.GRADIENTS: BACKWARD, ops.REDUCED: BACKWARD}


def check_checks(facts: Facts) -> None:
    """A check reads floating-point tensors; one report, the last node, reads each check once.

    From `Stage.CHECKED` on, if the policy asks for checks, one reads every gradient behind its last
    reduce, or before it is accumulated.
    """
    checks = [node for node in facts.nodes if node.target is ops.check_finite]
    reports = [node for node in facts.nodes if node.target is ops.report_finite]
    for check in checks:
        _check_operands(facts, check)
    for report in reports:
        _check_report(facts, report, checks)
    if len(reports) > 1:
        facts.fail("checks", reports[1], f"%{reports[0].name} reports the checks already")
    if checks and not reports:
        facts.fail("checks", checks[0], "no report_finite tells the ranks what it found")
    if facts.plan.policy.check_finite is not None and Stage.CHECKED in facts.done:
        _check_gradients(facts, checks)


def _check_operands(facts: Facts, check: fx.Node) -> None:
    of = Check.of_node(check).of
    if _PHASES.get(str(of)) != check.meta["phase"]:
        facts.fail("checks", check, f"{of!r} are not checked in {check.meta['phase']}")
    values = values_of(check)
    for value in values:
        if not is_floating(value.meta.get("val")) or value.target in ops.COPIES:
            facts.fail("checks", check, f"%{value.name} is no floating-point tensor")
    if not values:
        facts.fail("checks", check, "it reads nothing")
    for user in check.users:
        if user.target is not ops.report_finite:
            facts.fail("checks", user, f"it reads %{check.name}, which only a report may read")


def _check_report(facts: Facts, report: fx.Node, checks: list[fx.Node]) -> None:
    if values_of(report) != checks:
        facts.fail("checks", report, "it must read each check once, in their order")
    if facts.place[report] != len(facts.nodes) - 2:
        facts.fail("checks", report, "it must be the last node before the output")


def _check_gradients(facts: Facts, checks: list[fx.Node]) -> None:
    first: dict[fx.Node, int] = {}
    for check in checks:
        for value in values_of(check):
            first.setdefault(value, facts.place[check])
    for node in facts.nodes:
        place = facts.place[node]
        if node.target is ops.accumulate_grad:
            grads, when = node.all_input_nodes, "before it is accumulated"
        elif node.target in ops.REDUCES and facts.program.world_size == 1:
            grads, when = operands_of(node), "before it"
        elif node.target in ops.REDUCES:
            grads, when, place = final_gradients(node), "behind it", END - 1
        else:
            continue
        for grad in grads:
            if is_floating(grad.meta["val"]) and first.get(grad, END) > place:
                facts.fail("checks", node, f"no check reads %{grad.name} {when}")
