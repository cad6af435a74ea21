"""Scheduling by cost: never slower in simulation than FSDP's order, never above its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import toy_programs as toys

from graphshard import Policy
from graphshard.errors import PassError
from graphshard.passes.keep_if_better import KeepIfBetter
from graphshard.passes.overlap import Overlap
from graphshard.pipeline import default_passes, run_passes
from graphshard.schedule.score import score_of


def scheduled(build: Any, **fields: Any) -> Any:
    """The program of a toy by the policy's schedule, and its plan."""
    return toys.rewritten(build, Policy(schedule="overlap", **fields))


def test_the_budget_is_what_fsdp_s_order_needs_and_is_shown() -> None:
    program, plan = scheduled(toys.blocks)
    plain, _ = toys.rewritten(toys.blocks, Policy())
    plain.budget = program.budget
    assert program.budget.bytes == score_of(plain, plan).bytes
    assert f"holds at most {program.budget.bytes:,} bytes at once" in str(program)
    assert "timed on cpu-gloo" in str(program)
    given, _ = scheduled(toys.blocks, memory_budget=10**6, hardware="h200")
    assert "timed on h200, holds at most 1,000,000 bytes at once (memory_budget)" in str(given)


def test_scheduling_needs_a_budget() -> None:
    program, plan = toys.rewritten(toys.blocks, Policy())
    with pytest.raises(PassError, match="run SetBudget"):
        Overlap().apply(program, plan)


@dataclass(frozen=True)
class Waste:
    """Compute something nobody reads."""

    name: str = field(default="waste", init=False)

    def apply(self, program: Any, plan: Any) -> None:
        node = next(n for n in program.nodes("forward") if n.target is torch.ops.aten.mm.default)
        with program.graph.inserting_after(node):
            again = program.graph.node_copy(node)
        again.meta = dict(node.meta)


@dataclass(frozen=True)
class Spare:
    """Take that away again."""

    name: str = field(default="spare", init=False)

    def apply(self, program: Any, plan: Any) -> None:
        for node in list(program.nodes("forward")):
            if node.target is torch.ops.aten.mm.default and not node.users:
                program.graph.erase_node(node)


def test_a_pass_by_which_the_step_gains_is_kept_and_no_other() -> None:
    policy = Policy(schedule="overlap")
    *passes, last = default_passes(policy)
    expected, plan = scheduled(toys.blocks)
    for tried, before in ((Waste(), ()), (Spare(), (Waste(),))):
        program = toys.blocks()
        run_passes(program, plan, (*passes, *before, KeepIfBetter(tried, (last,)), last))
        assert str(program) == str(expected)
        assert program.budget is not None
        assert program.budget.best == score_of(program, plan)
