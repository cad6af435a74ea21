"""Along which dim a parameter is split, by itself."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import Experts, MoE
from meta_models import tree_of
from torch import nn

import graphshard
from graphshard.errors import VerifyError
from graphshard.planning.layout import ParamLayout
from graphshard.planning.planner import make_plan
from graphshard.policy.placement import COPIES, MIN_BYTES, split_dim
from graphshard.policy.units import BlockPolicy
from graphshard.program import ops
from graphshard.program.storages import live_unsharded, storages_of
from graphshard.program.text import full_text
from graphshard.runtime.fingerprint import Fingerprint
from graphshard.verify.rules import verify

SHAPES = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 3000)), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(shape=SHAPES, itemsize=st.sampled_from([1, 2, 4, 8]), ranks=st.integers(1, 512))
@example(shape=[8, 1024, 4096], itemsize=2, ranks=64)
@example(shape=[8, 1025, 4097], itemsize=2, ranks=64)
def test_padding_above_a_tenth_remains_only_where_copies_cost_more(shape, itemsize, ranks):
    dim = split_dim(shape, itemsize, ranks)
    numel, rows = prod(shape), -(-shape[0] // ranks)
    padded = rows * ranks * (numel // shape[0])
    small = numel * itemsize < MIN_BYTES
    dividing = [d for d in range(1, len(shape)) if shape[d] % ranks == 0]
    if small or padded <= 1.1 * numel:
        assert dim == 0
    elif dividing:
        assert dim == dividing[0]
    else:
        shard = padded // ranks
        copies = COPIES * numel
        assert dim == (None if copies <= COPIES * shard + padded else 0)


@given(shape=SHAPES, ranks=st.integers(1, 512), dim=st.integers(0, 3))
def test_the_parts_of_a_dim_make_up_the_parameter(shape, ranks, dim):
    dim = dim % len(shape)
    if dim and shape[dim] % ranks:
        return
    layout = ParamLayout("p", ("p",), tuple(shape), torch.float32, True, "shard", ranks, dim)
    spans = [layout.rows(rank) for rank in range(ranks)]
    assert (spans[0][0], spans[-1][1]) == (0, shape[dim])
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert layout.full_bytes == ranks * layout.shard_bytes == 4 * prod(layout.gathered_shape)
    assert layout.padding_bytes == 0 if dim else layout.padding_bytes >= 0


def moe(*shape):
    experts = nn.Module()
    experts.w = nn.Parameter(torch.empty(shape, device="meta"))
    return tree_of(experts=experts)


def test_stacked_experts_on_many_ranks_are_split_along_another_dim():
    plan = make_plan(moe(8, 1024, 4096), BlockPolicy("Module"), world_size=64)
    layout = plan.layouts["experts.w"]
    assert (layout.dim, layout.shard_shape, layout.padding_bytes) == (1, (8, 16, 4096), 0)
    assert "dim 1: experts.w [8, 1024, 4096]" in str(plan)
    assert plan.warnings == ()
    assert "dim 1" not in str(make_plan(moe(64, 16, 4096), BlockPolicy("Module"), world_size=64))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((8, 255, 257), "replicated: experts.w [8, 255, 257]: every rank keeps them whole"),
        ((65, 255, 257), "padded: experts.w [65, 255, 257]: no dimension divides, and copies"),
    ],
)
def test_what_nothing_divides_is_copied_or_padded_and_the_plan_says_so(shape, said):
    plan = make_plan(moe(*shape), BlockPolicy("Module"), world_size=64)
    assert said in str(plan)


def test_small_parameters_stay_as_fsdp2_has_them():
    plan = make_plan(moe(2, 64, 64), BlockPolicy("Module"), world_size=4)
    assert plan.layouts["experts.w"].dim == 0
    assert plan.layouts["experts.w"].shard_shape == (1, 64, 64)


# -- programs ----------------------------------------------------------------------------------


def planned(world_size, **fields):
    with torch.device("meta"):
        made, inputs = MoE(), (torch.zeros(6, dtype=torch.int64),) * 2
    policy = BlockPolicy({Experts}, **fields)
    return graphshard.plan(made, policy, world_size=world_size, example_inputs=inputs)


def test_the_program_says_the_dims_and_counts_the_copy():
    program = planned(4).program
    gather = next(n for n in program.nodes() if n.kwargs.get("unit") == "blocks.0")
    assert gather.kwargs["params"] == ("blocks.0.w", "blocks.0.gate.weight", "blocks.0.gate.bias")
    assert gather.kwargs["dims"] == (1, 0, 0)
    assert "f32[2, 128, 128] by dim 1" in str(program)
    assert "dims=(1, 0, 0)" in full_text(program)
    live = dict(live_unsharded(program))
    wait = next(user for user in gather.users)
    w = 2 * 128 * 128 * 4
    assert live[wait] == live[wait.prev] + w
    assert live[wait.next] == live[wait.prev]


def test_the_copy_counts_against_the_budget():
    program = planned(4).program
    most = max(live for _, live in live_unsharded(program))
    held = max(live for node, live in live_unsharded(program) if node.target is ops.all_gather)
    assert held < most
    storages = storages_of(program)
    (copied,) = {s.size for s in storages.all if s.node.target is ops.wait}
    assert copied == most - held
    peak = max(storages.live())
    planned(4, memory_budget=peak)
    with pytest.raises(VerifyError, match="budget"):
        planned(4, memory_budget=peak - 1)


def test_ranks_compare_the_dims():
    program, by_dim_1 = planned(4).program, planned(4)
    lines = Fingerprint.of(program.graph, by_dim_1).lines
    assert any("blocks.0.w [2, 128, 128] float32 by dim 1" in line for line in lines)


def test_verify_wants_the_dims_the_layouts_have():
    plan = planned(4)
    gather = next(n for n in plan.program.nodes() if n.kwargs.get("unit") == "blocks.0")
    gather.kwargs = {name: value for name, value in gather.kwargs.items() if name != "dims"}
    with pytest.raises(VerifyError, match=r"layouts say dims=\(1, 0, 0\)"):
        verify(plan.program, plan, after="test")
