"""accumulate and zero_missing_grads, on hand-built programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import toy_programs as toys

from graphshard.errors import PassError
from graphshard.passes.accumulate import Accumulate
from graphshard.passes.zero_missing_grads import ZeroMissingGrads
from graphshard.pipeline import default_passes, passes_for, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program.program import Program
from graphshard.verify.rules import verify


def rewritten(
    build=toys.blocks,
    keep: str | None = None,
    add: tuple[str, ...] = (),
    **fields: object,
) -> tuple[Program, ShardingPlan]:
    policy = Policy(merge_below=0, **fields)
    program = build()
    plan = toys.make_toy_plan(program, toys.UNITS[build], policy)
    run_passes(program, plan, passes_for(default_passes(policy), (keep, add, ())))
    return program, plan


def backward_ops(program: Program) -> list[tuple[str, str]]:
    return [
        (event.op, event.unit)
        for event in program.schedule()
        if event.phase == "backward"
        and event.op in ("accumulate_grad", "add_accumulated", "reduce_scatter")
    ]


def every_name(program: Program) -> tuple[str, ...]:
    return tuple(param.fqn for param in program.params if param.requires_grad)


def test_what_is_kept_is_not_reduced() -> None:
    program, _ = rewritten(keep="gradient")
    units = ["", "layers.2", "layers.1", "layers.0", ""]  # the head's at once, then the embedding's
    assert backward_ops(program) == [("accumulate_grad", unit) for unit in units]
    assert all(grad is None for grad in program.results().grads)
    numel = sum(param.numel for param in program.params)
    (note,) = program.notes
    assert note == f"keeps {4 * numel:,} bytes of unsharded gradients on each rank (no_sync)"
    assert "accumulate_grad  " in str(program)


def test_what_was_kept_goes_into_the_reduce() -> None:
    names = every_name(toys.blocks())
    program, plan = rewritten(add=names)
    units = ["layers.2", "layers.1", "layers.0", ""]
    assert backward_ops(program) == [
        (op, unit) for unit in units for op in ("add_accumulated", "reduce_scatter")
    ]
    verify(program, plan, after="the test")


def test_a_kept_gradient_without_a_reduce_is_an_error() -> None:
    program = toys.odd_params()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.odd_params])
    with pytest.raises(PassError, match=r"accumulated gradient of 'a.unused' goes into no reduce"):
        run_passes(program, plan, [*default_passes(plan.policy)[:-6], Accumulate(add=BOTH)])
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks])
    with pytest.raises(PassError, match="over replicas"):
        run_passes(program, plan, passes_for(default_passes(plan.policy), ("shard", (), ())))
    with pytest.raises(PassError, match="no parameter 'nobody'"):
        ZeroMissingGrads(frozenset({"nobody"})).apply(program, plan)


BOTH = frozenset({"a.unused", "gain"})


def test_gradients_of_ignored_parameters_stay_as_they_are() -> None:
    captured = toys.blocks()
    made = toys.make_toy_plan(captured, toys.UNITS[toys.blocks])
    (root, *blocks) = made.units
    embed, *rest = root.layouts
    assert embed.fqn == "embed.weight"
    plan = replace(
        made,
        units=(replace(root, layouts=tuple(rest)), *blocks),
        ignored=(replace(embed, placement="ignore", world_size=1),),
    )
    before = captured.results().grads[0]
    run_passes(captured, plan, passes_for(default_passes(plan.policy), ("gradient", (), ())))
    assert captured.params[0].ignored
    assert captured.results().grads[0] is before
    assert captured.results().grads[1] is None
