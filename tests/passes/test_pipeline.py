"""Running passes: their order, their times, and how their failures are told."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from inspect import isabstract
from typing import Any

import pytest
import toy_programs as toys

import graphshard.passes
from graphshard import pipeline
from graphshard.errors import PassError, PlanError, VerifyError
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.recompute_budget import RecomputeToBudget
from graphshard.passes.reduce_grads import ReduceGrads
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.unshard import Unshard
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.pass_protocol import (
    Pass,
    PassLike,
    RehearsingPass,
    Stage,
    apply_passes,
    stages_of,
)
from graphshard.program.program import Program
from graphshard.verify import rules as verify_module
from graphshard.verify.rules import FINISHED, RULES

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
    "split_gathers",
    "split_reduces",
    "skip_reshard",
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

    def advance(self, steps: int = 1) -> None:
        self.steps += steps


def test_default_passes_follow_the_policy() -> None:
    base = default_passes(Policy())
    assert [p.name for p in base] == [*DEFAULT[:-1], "merge_gathers", "split_ends", DEFAULT[-1]]
    for unmerged in ({"merge_below": 0}, {"memory_budget": 1 << 40}):
        assert [p.name for p in default_passes(Policy(**unmerged))] == DEFAULT
    merged = default_passes(Policy(merge_below=100, memory_budget=1 << 40))[-3]
    assert merged == MergeGathers(100, forward=1, backward=1)
    for options in (
        {"backward_prefetch": "post"},
        {"forward_prefetch": 2},
        {"recompute": "units"},
    ):
        assert default_passes(Policy(**options)) != base


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


@contextmanager
def verified() -> Iterator[list[tuple[str, bool]]]:
    """The passes behind which the program is verified inside, and whether by all rules."""
    seen: list[tuple[str, bool]] = []

    def verify(*args: Any, after: str, rules: Any = RULES, **options: Any) -> Any:
        seen.append((after, rules is RULES))
        return verify_module.verify(*args, after=after, rules=rules, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "verify", verify)
        yield seen


def test_all_rules_are_checked_at_the_ends_and_around_passes_of_ones_own() -> None:
    program, plan = captured()
    first, *rest = default_passes(plan.policy)
    with verified() as seen:
        run_passes(program, plan, (first, *rest))
    assert seen[0] == ("capture", True)
    assert seen[1:] == [(name, name == DEFAULT[-1]) for name in DEFAULT]
    program, plan = captured()
    with verified() as seen:
        run_passes(program, plan, (first, DropFrees("mine", do=False), *rest))
    assert [name for name, fully in seen if fully] == ["capture", first.name, "mine", DEFAULT[-1]]


@pytest.mark.parametrize("noticed_by", ["the rules", "a later pass"])
def test_a_pass_of_ours_that_breaks_the_program_is_named(monkeypatch, noticed_by: str) -> None:
    """The passes run again on a copy, verified by all rules behind each."""
    program, plan = captured()
    passes = default_passes(plan.policy)
    apply = InsertFree.apply

    def frees_too_little(step: InsertFree, program: Program, plan: ShardingPlan) -> None:
        apply(step, program, plan)
        program.graph.erase_node(next(n for n in program.nodes() if n.target is ops.free))

    monkeypatch.setattr(InsertFree, "apply", frees_too_little)
    if noticed_by == "a later pass":
        monkeypatch.setattr(SplitGathers, "apply", lambda *_: 1 / 0)
    with (
        verified() as seen,
        pytest.raises(VerifyError, match=r"after pass 'insert_free' .*'frees'"),
    ):
        run_passes(program, plan, passes)
    assert [name for name, _ in seen].count("capture") == 2
    assert seen[-1] == ("insert_free", True)


def test_passes_of_ours_keep_the_order_of_gathers_one_by_one(monkeypatch) -> None:
    program, plan = captured()
    apply = InsertFree.apply

    def swaps_gathers(step: InsertFree, program: Program, plan: ShardingPlan) -> None:
        apply(step, program, plan)
        first, second, *_ = (n for n in program.nodes() if n.target is ops.all_gather)
        first.prepend(second)

    monkeypatch.setattr(InsertFree, "apply", swaps_gathers)
    with pytest.raises(VerifyError, match=r"after pass 'insert_free' .*'order'"):
        run_passes(program, plan, default_passes(plan.policy))


@pytest.mark.parametrize("idle", [Unshard, ReduceGrads, InsertFree], ids=lambda c: c.__name__)
def test_a_pass_that_did_not_do_its_work_is_found(monkeypatch, idle: type) -> None:
    program, plan = captured()
    passes = default_passes(plan.policy)
    monkeypatch.setattr(idle, "apply", lambda *_: None)
    until = next(index for index, step in enumerate(passes) if type(step) is idle)
    with pytest.raises(VerifyError, match=f"after pass '{passes[until].name}'"):
        run_passes(program, plan, passes[: until + 1])


def test_the_default_passes_establish_every_stage_that_rules_ask_about() -> None:
    policy = Policy(
        schedule="overlap",
        hardware="a100-80gb",
        offload="params",
        check_finite="error",
    )
    assert stages_of(*default_passes(policy)) == FINISHED | Stage.OFFLOADED == ~Stage.CAPTURED


@dataclass(frozen=True)
class FreeNothing(Pass):
    """Says that all is freed, and frees nothing."""

    establishes = Stage.FREED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        pass


@dataclass(frozen=True)
class FreeNothingQuietly:
    name: str = "free_nothing"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        pass


def test_a_stage_that_a_pass_of_ones_own_establishes_is_checked() -> None:
    program, plan = captured()
    unfreed = default_passes(plan.policy)[: DEFAULT.index("insert_free")]
    run_passes(program, plan, (*unfreed, FreeNothingQuietly()))
    program, plan = captured()
    with pytest.raises(VerifyError, match=r"after pass 'free_nothing' .*is never freed"):
        run_passes(program, plan, (*unfreed, FreeNothing()))
    program, plan = captured()
    quiet = FreeNothingQuietly()
    object.__setattr__(quiet, "establishes", Stage.FREED)  # no subclass of `Pass` is needed
    with pytest.raises(VerifyError, match=r"after pass 'free_nothing' .*is never freed"):
        run_passes(program, plan, (*unfreed, quiet))


def all_passes() -> list[type[Pass]]:
    """The class of every pass in `graphshard.passes`."""
    modules = pkgutil.iter_modules(graphshard.passes.__path__, "graphshard.passes.")
    classes = {
        value
        for module in modules
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, type) and issubclass(value, Pass) and not isabstract(value)
    }
    return sorted(classes, key=lambda step: step.__name__)


@pytest.mark.parametrize("step", all_passes(), ids=lambda step: step.__name__)
def test_a_pass_has_its_name_from_its_class_and_holds_no_other_pass(step: type[Pass]) -> None:
    words = step.__name__.lower(), step.name.replace("_", "")
    assert words[0] == words[1] or step is RecomputeToBudget
    assert step.__module__.startswith("graphshard.passes.")
    assert is_dataclass(step)
    holding = [
        (field.name, name)
        for field in fields(step)
        for name in ("Pass", "PassLike", "Stage")
        if re.search(rf"\b{name}\b", str(field.type))
    ]
    assert not holding


def test_the_runner_hands_over_the_passes_that_follow() -> None:
    handed: list[list[str]] = []

    @dataclass(frozen=True)
    class Rehearse(RehearsingPass):
        def rehearsed(self, following: Sequence[PassLike]) -> tuple[PassLike, ...]:
            return tuple(following[:2])

        def apply_before(
            self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]
        ) -> None:
            handed.append([step.name for step in rest])
            apply_passes(rest, program.copy(), plan)

    program, plan = captured()
    timings = run_passes(program, plan, (Rehearse(), *default_passes(plan.policy), Rehearse()))
    assert [timing.name for timing in timings] == ["rehearse", *DEFAULT, "rehearse"]
    assert handed == [["recompute", "unshard"], []]


def test_passes_of_ones_own_between_the_default_ones() -> None:
    program, plan = captured()
    first, *rest = default_passes(plan.policy)
    run_passes(program, plan, (first, DropFrees("my_pass"), *rest))
    toys.assert_same_values(toys.blocks(), program, plan)
