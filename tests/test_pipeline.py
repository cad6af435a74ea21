"""Running passes: their order, their times, and how their failures are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import toy_programs as toys

from graphshard import ops
from graphshard.errors import PassError, PlanError, VerifyError
from graphshard.pipeline import Pass, default_passes, run_passes
from graphshard.plan import ShardingPlan
from graphshard.policy import Policy
from graphshard.program import Program

DEFAULT = [
    "recompute",
    "unshard",
    "partial_reshard",
    "regather",
    "zeros_for_kept",
    "reduce_grads",
    "reduce_replicas",
    "precision",
    "accumulate",
    "prefetch",
    "sink_waits",
    "insert_free",
    "release_early",
]


def captured() -> tuple[Program, ShardingPlan]:
    program = toys.blocks()
    return program, toys.make_toy_plan(program, toys.UNITS[toys.blocks])


@dataclass(frozen=True)
class DropFrees:
    name: str = "drop_frees"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        for node in list(program.nodes()):
            if node.target is ops.free:
                program.graph.erase_node(node)


@dataclass(frozen=True)
class Fail:
    name: str = "fail"
    error: type[Exception] = ZeroDivisionError

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        raise self.error("by nothing")


class Stages:
    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []
        self.steps = 0

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        self.seen.append("/".join([*self.open, name]))
        self.open.append(name)
        yield
        self.open.pop()

    def advance(self) -> None:
        self.steps += 1


def test_default_passes_follow_the_policy() -> None:
    assert [p.name for p in default_passes(Policy())] == DEFAULT
    base = default_passes(Policy())
    for fields in (
        {"backward_prefetch": "post"},
        {"forward_prefetch": 2},
        {"recompute": "units"},
    ):
        assert default_passes(Policy(**fields)) != base


def test_each_pass_is_timed_shown_and_announced() -> None:
    program, plan = captured()
    seen: list[tuple[str, int]] = []
    stages = Stages()

    def watch(step: Pass, now: Program) -> None:
        assert now is program
        seen.append((step.name, len(now.schedule())))

    timings = run_passes(program, plan, default_passes(plan.policy), watcher=watch, progress=stages)
    assert [t.name for t in timings] == [name for name, _ in seen] == DEFAULT
    assert all(t.seconds >= 0 and t.verify_seconds >= 0 for t in timings)
    assert seen[-1][1] > seen[0][1]
    assert stages.seen[:2] == ["verify", "passes"]
    assert stages.seen[2:6] == [
        "passes/recompute",
        "passes/verify",
        "passes/unshard",
        "passes/verify",
    ]
    assert stages.steps == len(DEFAULT)


def test_a_failing_pass_is_named() -> None:
    program, plan = captured()
    with pytest.raises(PassError, match="pass fail failed: ZeroDivisionError: by nothing"):
        run_passes(program, plan, (Fail(),))
    with pytest.raises(PlanError, match="pass fail: by nothing"):
        run_passes(program, plan, (Fail(error=PlanError),))


def test_a_pass_that_breaks_the_program_is_named() -> None:
    program, plan = captured()
    with pytest.raises(VerifyError, match=r"after pass 'drop_frees' .*'frees'"):
        run_passes(program, plan, (*default_passes(plan.policy), DropFrees()))


def test_passes_of_ones_own_between_the_default_ones() -> None:
    program, plan = captured()
    first, *rest = default_passes(plan.policy)
    run_passes(program, plan, (first, DropFrees("my_pass"), *rest))
    toys.assert_same_values(toys.blocks(), program, plan)
