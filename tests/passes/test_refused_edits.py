"""Faults in what single passes write that the corruptions of tests/verify do not make."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy_programs as toys
from toy_programs import emit, named, offloaded

from graphshard.errors import VerifyError
from graphshard.passes.release_early import ReleaseEarly
from graphshard.pipeline import default_passes, passes_for, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import Program
from graphshard.verify.facts import Reference
from graphshard.verify.rules import FINISHED, verify

Made = tuple[Program, ShardingPlan]


def released() -> Made:
    policy = toys.gathering_at_need(Policy())
    every = ReleaseEarly(min_bytes=1)
    return toys.rewritten(toys.blocks, policy, passes=[*default_passes(policy)[:-1], every])


def kept(**fields: Any) -> Made:
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks], Policy(**fields))
    run_passes(program, plan, passes_for(default_passes(plan.policy), ("gradient", (), ())))
    return program, plan


def nodes(program: Program, op: Any) -> list[Any]:
    return [node for node in program.nodes() if node.target is op]


def release_of_a_list(program: Program) -> None:
    node = nodes(program, ops.release)[0]
    node.args = (node.args[0].args[0],)


def release_of_a_reduce(program: Program) -> None:
    picked = min(named(program, "layers_1_reduced").users)
    emit(program, picked, ops.release, picked, like=nodes(program, ops.release)[-1])


def read_after_given_back(program: Program) -> None:
    back = named(program, "relu_default_1_back")
    back.replace_all_uses_with(named(program, "relu_default_1"))


def gradient_that_is_none(program: Program) -> None:
    copy = named(program, "layers_1_up_weight_grad_to_host")
    copy.args = (named(program, "layers_1_up_weight"),)


def one_returned_beside_kept_ones(program: Program) -> None:
    results = program.results()
    results.grads[0] = nodes(program, ops.accumulate_grad)[0].args[0]
    program.set_results(results)


def rounded_before_it_is_added(program: Program) -> None:
    node = nodes(program, ops.accumulate_grad)[0]
    (gradient,) = node.args
    with program.graph.inserting_before(node):
        cast = program.graph.node_copy(gradient)
    cast.target, cast.args, cast.meta = ops.cast, (gradient,), {**node.meta}
    cast.kwargs = {"dtype": torch.bfloat16, **{k: node.kwargs[k] for k in ("unit", "param")}}
    node.args = (cast,)


ROUNDED = MixedPrecision(reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "edit", "said"),
    [
        (released, release_of_a_list, "pick one result"),
        (released, release_of_a_reduce, "was not gathered into a new buffer"),
        (
            lambda: offloaded(toys.blocks),
            read_after_given_back,
            "on the device after %relu_default_1_on_host",
        ),
        (
            lambda: offloaded(toys.blocks, "params"),
            gradient_that_is_none,
            "%layers_1_up_weight is not a gradient 'layers.1.up.weight'",
        ),
        (kept, one_returned_beside_kept_ones, "is returned, but those of others are kept"),
        (
            lambda: kept(mixed_precision=ROUNDED),
            rounded_before_it_is_added,
            "cast, and the sum is to be rounded alone",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_edit_is_refused(
    make: Callable[[], Made], edit: Callable[[Program], None], said: str
) -> None:
    program, plan = make()
    offloads = plan.policy.offloads("params")
    done = FINISHED | Stage.OFFLOADED if offloads else FINISHED
    reference = Reference.of(program) if plan.policy.offload else None
    verify(program, plan, after="before", done=done, reference=reference)
    edit(program)
    with pytest.raises(VerifyError, match=re.escape(said)):
        verify(program, plan, after="the culprit", done=done, reference=reference)
