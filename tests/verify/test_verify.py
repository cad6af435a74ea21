"""A program broken in each way, and the error that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import toy_programs as toys
from broken_programs import BREAKS, missing_free, named
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from toy_programs import BATCH, VOCAB, WIDTH

from graphshard.errors import VerifyError
from graphshard.policy.units import Policy
from graphshard.program.program import FORWARD, Program, signature
from graphshard.program.storages import storages_of
from graphshard.verify.facts import Reference
from graphshard.verify.rules import verify


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_program_is_refused(break_it: Callable[[Program], None]) -> None:
    program, plan = toys.rewritten(toys.blocks)
    reference = Reference.of(program)
    verify(program, plan, after="before")
    break_it(program)
    rule, said = BREAKS[break_it]
    with pytest.raises(VerifyError) as raised:
        verify(program, plan, after="the culprit", reference=reference)
    message = str(raised.value)
    assert message.startswith(f"after pass 'the culprit' the program breaks the rule {rule!r}: ")
    assert said in message


def test_the_dump_around_the_fault_is_shown() -> None:
    program, plan = toys.rewritten(toys.blocks)
    missing_free(program)
    with pytest.raises(VerifyError) as raised:
        verify(program, plan, after="prefetch")
    said, where, *dump = str(raised.value).splitlines()
    assert where == "node %layers_1_full_1, unit 'layers.1'"
    assert said == (
        "after pass 'prefetch' the program breaks the rule 'frees': "
        "what %layers_1_all_gather_1 gathered is never freed"
    )
    assert [line[:2] for line in dump] == ["  ", "  ", "> ", "  ", "  "]
    assert dump[1].startswith("  %layers_0_all_gather_1 : None = all_gather([%layers_0_up_weight, ")
    assert dump[2] == (
        "> %layers_1_full_1 : (f32[8, 6], f32[6, 8]) = wait(%layers_1_all_gather_1)"
        "  # backward layers.1"
    )


def test_a_wait_in_the_other_phase() -> None:
    program, plan = toys.rewritten(toys.blocks, Policy(backward_prefetch=None))
    gather = named(program, "layers_2_all_gather_1")
    gather.meta["phase"] = FORWARD
    program.first_backward().prepend(gather)
    with pytest.raises(VerifyError, match=r"'waits'.*issued in forward and waited for in backward"):
        verify(program, plan, after="x")


def test_a_replicated_parameter_is_not_gathered() -> None:
    program, plan = toys.rewritten(toys.odd_params)
    gather = named(program, "a_all_gather")
    gain = next(p for p in program.params if p.fqn == "a.gain")
    gather.args = ([*gather.args[0], gain.node],)
    gather.kwargs = {**gather.kwargs, "params": (*gather.kwargs["params"], "a.gain")}
    with pytest.raises(VerifyError, match=r"'gathers'.*'a.gain' is whole on each rank"):
        verify(program, plan, after="x")


def test_a_frozen_parameter_has_no_gradient() -> None:
    program, plan = toys.rewritten(toys.blocks)
    program.params = tuple(
        dataclasses.replace(p, requires_grad=p.fqn != "head.weight") for p in program.params
    )
    with pytest.raises(VerifyError, match=r"'reduces'.*'head.weight' is frozen"):
        verify(program, plan, after="x")


def test_budget() -> None:
    # 4 ranks: 12 of the root's two times 10 rows after padding, 8 of each of a block's.
    root, block = 4 * (2 * 12 * WIDTH), 4 * (8 * WIDTH + 8 * 8)
    program, _ = toys.rewritten(toys.blocks)
    most = max(storages_of(program).live())
    toys.rewritten(toys.blocks, Policy(memory_budget=most))
    with pytest.raises(VerifyError) as raised:
        toys.rewritten(toys.blocks, Policy(memory_budget=most - 1))
    said, where, *_ = str(raised.value).splitlines()
    x, h, wide = 4 * BATCH * WIDTH, 4 * BATCH * 8, 4 * BATCH * VOCAB
    grad = 4 * 8 * WIDTH
    assert said == (
        f"after pass 'release_early' the program breaks the rule 'budget': the step holds {most:,} "
        f"bytes here, more than memory_budget={most - 1:,} (unsharded parameters "
        f"{root + 2 * block:,}: (root) {root:,}, layers.0 {block:,}, layers.1 {block:,}; saved for "
        f"backward {2 * x + h:,}: layers.0 {x + h:,}, (root) {x:,}; gradients to reduce "
        f"{4 * grad + 240:,}: layers.1 {2 * grad:,}, layers.2 {2 * grad:,}, (root) 240; returned "
        f"{wide:,}: (root) {wide:,}; at work 224: layers.1 224); recompute more, make smaller "
        "units, prefetch less, or raise the budget"
    )
    assert where == "node %mm_default_16, unit 'layers.1'"


def test_a_captured_program_needs_no_pass_to_be_valid() -> None:
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks])
    toys.run_passes(program, plan, ())


def test_symbolic_sizes_are_compared_without_guards() -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    fake = mode.from_tensor(torch.empty(BATCH, WIDTH), static_shapes=False)
    size = fake.shape[0]
    assert signature(fake) == signature(fake.clone())
    assert signature(fake) != signature(fake.new_empty((WIDTH, size)))
    assert not shapes.guards
