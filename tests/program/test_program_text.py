"""Programs as text: whole files, compared with what was reviewed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import toy_programs as toys

from graphshard.policy.units import Policy
from graphshard.program.text import argument_text, dtype_text, full_text, schedule_text, value_text

Golden = Callable[[str, str], None]


# Other tests add toys of their own to the table.
OWN = [build for build in toys.UNITS if build.__module__ == toys.__name__]


@pytest.mark.parametrize("build", OWN, ids=lambda build: build.__name__)
def test_schedule_dump(build: Callable[[], toys.Program], golden: Golden) -> None:
    program, _ = toys.rewritten(build)
    golden(f"schedule_{build.__name__}.txt", schedule_text(program))
    assert str(program) == schedule_text(program)


def test_schedule_dump_of_other_policies(golden: Golden) -> None:
    program, _ = toys.rewritten(toys.blocks, Policy(strategy="NO_SHARD"))
    golden("schedule_no_shard.txt", schedule_text(program))
    program, _ = toys.rewritten(toys.blocks, grad=False)
    golden("schedule_forward_only.txt", schedule_text(program))


def test_full_dump(golden: Golden) -> None:
    program, _ = toys.rewritten(toys.odd_params)
    program.notes = ("captured on cpu for cuda",)
    golden("full_odd_params.txt", full_text(program))


def test_a_captured_program_can_be_read_too(golden: Golden) -> None:
    program = toys.shared_block(times=1)
    golden("full_captured.txt", full_text(program))
    assert "compute" in schedule_text(program)


def test_a_broken_program_can_still_be_read() -> None:
    program, _ = toys.rewritten(toys.blocks)
    wait = next(n for n in program.nodes() if n.name == "layers_1_reduced")
    gather = next(n for n in program.nodes() if n.name == "layers_1_full")
    for node in (wait, gather):
        for user in list(node.users):
            user.replace_all_uses_with(program.inputs[0].node)
            program.graph.erase_node(user)
        program.graph.erase_node(node)
    assert "layers.1" in schedule_text(program)
    assert "%layers_1_all_gather" in full_text(program)


def test_values_and_arguments() -> None:
    assert value_text(torch.empty(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert value_text([torch.empty(()), None, 3]) == "(f32[], None, int)"
    assert dtype_text(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert argument_text((1, None, [True])) == "(1, None, [True])"
    assert argument_text((1,)) == "(1,)"
    assert argument_text({"a": slice(0, 2)}) == "{'a': slice((0, 2, None))}"
    assert argument_text(object()) == "<object>"
