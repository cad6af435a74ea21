"""Rules on compute: random numbers drawn again, checks for NaN and infinity, compiled regions."""

from __future__ import annotations

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.collective import begins_replay, device_of, generator_of, operands_of
from graphshard.program.finite import Check, final_gradients, is_floating, values_of
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, REPLAYS, signature
from graphshard.program.regions import REGION, Region, may_join, picks_from, regions_in
from graphshard.program.sizes import is_size
from graphshard.program.storages import END
from graphshard.torch_private.random_ops import may_draw, may_move_generators, state_bytes
from graphshard.verify.facts import Facts


def check_random_states(facts: Facts) -> None:
    """Forward saves states; backward sets one, draws only what forward drew, and restores.

    Which draw has which state, `check_values` looks at; for operators that may draw without saying
    so, `_check_untagged` does.
    """
    inside: dict[str, fx.Node] = {}  # by type of device, the node that set a saved state
    again: dict[str, list[str]] = {}  # by type of device, the draws repeated from that state
    for node in facts.nodes:
        if node.target in ops.RANDOM_STATES:
            _check_arguments(facts, node)
            _check_place(facts, node)
            if node.target is ops.set_random_state:
                _check_turn(facts, node, inside)
                again[device_of(node)] = []
        elif node.op == "call_function" and may_move_generators(node):
            device = generator_of(facts.program, node)
            if REPLAYS in node.meta:
                if may_draw(node) and not ops.is_random(node):
                    _check_untagged(facts, node, inside.get(device), again.get(device, []))
                again.setdefault(device, []).append(node.meta[REPLAYS])
            if ops.is_random(node) and device not in inside:
                continue
            if inside and RECOMPUTED not in node.meta:
                facts.fail("random states", node, "it would draw from a state of forward")
    for node in inside.values():
        facts.fail("random states", node, "the state that it returns is never put back")


def _check_untagged(facts: Facts, node: fx.Node, begin: fx.Node | None, since: list[str]) -> None:
    """Between its state and a repeated operator stand the draws that stood there in forward."""
    if begin is None:
        facts.fail("random states", node, "it may draw, and is repeated without a saved state")
        return
    device, found, expected = device_of(begin), False, []
    for each in facts.program.nodes(FORWARD):
        if each is begin.args[0]:
            found = True
        elif each.name == node.meta[REPLAYS]:
            break
        elif found and may_move_generators(each) and generator_of(facts.program, each) == device:
            expected.append(each.name)
    if not found or since != expected:
        state = begin.args[0]
        facts.fail("random states", node, f"in forward other draws stand between %{state} and it")


def _check_turn(facts: Facts, node: fx.Node, inside: dict[str, fx.Node]) -> None:
    """A saved state and the one before it are set in turn."""
    device = device_of(node)
    last = inside.pop(device, None)
    if begins_replay(node):
        inside[device] = node
        if last is not None:
            facts.fail("random states", node, f"%{last.name} set one that was not put back")
    elif last is not node.args[0]:
        facts.fail("random states", node, "it must put back what the last set_random_state gave")


def _check_arguments(facts: Facts, node: fx.Node) -> None:
    device, sets = device_of(node), node.target is ops.set_random_state
    size = state_bytes(device)
    if size is None or signature(node.meta["val"]) != ((size,), torch.uint8):
        facts.fail("random states", node, f"it is no state of a generator of {device!r}")
    states = [value for value in node.all_input_nodes if value.target in ops.RANDOM_STATES]
    if states != [*node.args] or len(states) != sets or any(device_of(s) != device for s in states):
        of = f"one state of {device!r}" if sets else "nothing"
        facts.fail("random states", node, f"it must take {of}")
    for user in node.users:
        if user.target is not ops.set_random_state:
            facts.fail("random states", user, f"it reads the random state %{node.name}")


def _check_place(facts: Facts, node: fx.Node) -> None:
    phase = FORWARD if node.target is ops.save_random_state else BACKWARD
    if node.meta["phase"] != phase:
        facts.fail("random states", node, f"it must stand in {phase}")


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
        if values_of(report) != checks:
            facts.fail("checks", report, "it must read each check once, in their order")
        if facts.place[report] != len(facts.nodes) - 2:
            facts.fail("checks", report, "it must be the last node before the output")
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


def check_regions(facts: Facts) -> None:
    """The nodes of a region may be compiled, have one unit and phase, and stand together.

    Only sizes, and values picked from results of other nodes, may stand between its first and its
    last node, and they must not need a value of the region. A release that belongs to a region has
    nodes of it on both sides.
    """
    table = facts.program.regions
    marked = [node for node in facts.nodes if REGION in node.meta]
    if table is None:
        for node in marked:
            facts.fail("regions", node, "it is in a region of a program that has none")
        return
    numbers = []
    releases = {node for node in marked if node.target is ops.release}
    for region in regions_in(facts.program.graph):
        numbers.append(region.number)
        nodes = [node for node in region.nodes if picks_from(node) is None]
        _check_nodes(facts, region, nodes)
        _check_between(facts, region, nodes)
        releases.difference_update(region.releases)
        for node in region.releases:
            if not facts.place[nodes[0]] < facts.place[node] < facts.place[nodes[-1]]:
                facts.fail("regions", node, f"it does not stand among region {region.number}")
        for value in region.inputs:
            if facts.place[value] > facts.place[nodes[-1]]:
                facts.fail("regions", value, f"region {region.number} needs it before")
    if numbers != list(range(len(table.forms))):
        facts.fail("regions", None, f"the table has other regions than the graph: {numbers}")
    for node in releases:
        facts.fail("regions", node, "it is said to be of a region that there is not")


def _check_nodes(facts: Facts, region: Region, nodes: list[fx.Node]) -> None:
    for node in nodes:
        if not may_join(node):
            facts.fail("regions", node, f"it cannot be compiled in region {region.number}")
        for key in ("unit", "phase"):
            was, now = nodes[0].meta[key], node.meta[key]
            if was != now:
                text = f"region {region.number} is of {key} {was!r}, this node of {now!r}"
                facts.fail("regions", node, text)


def _check_between(facts: Facts, region: Region, nodes: list[fx.Node]) -> None:
    inside = {*region.nodes, *region.releases}
    for node in facts.nodes[facts.place[nodes[0]] : facts.place[nodes[-1]]]:
        if node in inside:
            continue
        if ops.is_unpack(node) or not (picks_from(node) is not None or is_size(node)):
            facts.fail("regions", node, f"it stands in the midst of region {region.number}")
        if any(value in inside for value in node.all_input_nodes):
            facts.fail("regions", node, f"it needs a value from inside region {region.number}")
