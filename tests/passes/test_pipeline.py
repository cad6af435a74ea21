"""Running passes: their order, their times, and how their failures are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import toy_programs as toys

from graphshard import MixedPrecision, pipeline
from graphshard.errors import PassError, PlanError, VerifyError
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.overlap import Overlap
from graphshard.passes.reduce_grads import ReduceGrads
from graphshard.passes.release_early import ReleaseEarly
from graphshard.passes.unshard import Unshard
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program
from graphshard.verify import rules as verify_module
from graphshard.verify.facts import Facts, Reference
from graphshard.verify.rules import FINISHED, LATER_RULES, RULES

DEFAULT = [
    "recompute",
    "unshard",
    "partial_reshard",
    "regather",
    "zero_missing_grads",
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
    do: bool = True

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        for node in list(program.nodes()):
            if self.do and node.target is ops.free:
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


def test_what_a_pass_left_as_it_was_is_not_verified_again(monkeypatch) -> None:
    program, plan = captured()
    verified: list[tuple[str, bool]] = []

    def verify(*args: Any, after: str, rules: Any = RULES, **options: Any) -> Any:
        verified.append((after, rules is RULES))
        return verify_module.verify(*args, after=after, rules=rules, **options)

    monkeypatch.setattr(pipeline, "verify", verify)
    run_passes(program, plan, (*default_passes(plan.policy), DropFrees("nothing", do=False)))
    assert verified == [
        ("capture", True),
        ("unshard", True),
        ("regather", True),
        ("reduce_grads", True),
        ("reduce_replicas", False),
        ("precision", False),
        ("accumulate", False),
        ("prefetch", True),
        ("sink_waits", True),
        ("insert_free", True),
        ("release_early", False),
    ]


@pytest.mark.parametrize("idle", [Unshard, ReduceGrads, InsertFree], ids=lambda c: c.__name__)
def test_a_pass_that_did_not_do_its_work_is_found(monkeypatch, idle: type) -> None:
    program, plan = captured()
    passes = default_passes(plan.policy)
    monkeypatch.setattr(idle, "apply", lambda *_: None)
    until = next(index for index, step in enumerate(passes) if type(step) is idle)
    with pytest.raises(VerifyError, match=f"after pass '{passes[until].name}'"):
        run_passes(program, plan, passes[: until + 1])


def test_the_rules_that_ask_for_more_later_are_known(monkeypatch) -> None:
    """Each rule that asks what has run is checked again once that has, if nothing changed."""
    asked: set[tuple[type, Any]] = set()

    class Done(frozenset[type]):
        def __contains__(self, step: object) -> bool:
            assert isinstance(step, type)
            asked.add((step, rule))
            return super().__contains__(step)

    for policy, mesh in (
        (Policy(strategy="HYBRID_SHARD"), (2, 2)),
        (Policy(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)), (4,)),
        (Policy(memory_budget=1 << 40), (4,)),
        (Policy(memory_budget=1 << 40, schedule="overlap", hardware="a100-80gb"), (4,)),
    ):
        program, plan = toys.rewritten(toys.blocks, policy, mesh=mesh)
        partly = default_passes(policy)[: DEFAULT.index("insert_free")]
        unfreed, _ = toys.rewritten(toys.blocks, policy, mesh=mesh, passes=partly)
        for made, done in (
            (program, FINISHED),
            (unfreed, FINISHED - {InsertFree, ReleaseEarly, Overlap}),
        ):
            reference = Reference.of(made)
            facts = Facts.of(made, plan, after="all", done=Done(done), reference=reference)
            for rule in RULES:
                rule(facts)
    assert asked == {(step, rule) for step, rules in LATER_RULES.items() for rule in rules}


def test_passes_of_ones_own_between_the_default_ones() -> None:
    program, plan = captured()
    first, *rest = default_passes(plan.policy)
    run_passes(program, plan, (first, DropFrees("my_pass"), *rest))
    toys.assert_same_values(toys.blocks(), program, plan)
