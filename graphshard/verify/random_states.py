"""Rule on random states: backward sets one that forward saved, draws again, and puts it back."""

from __future__ import annotations

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, REPLAYS, signature
from graphshard.program.random_states import begins_replay, device_of, generator_of
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
