"""Along which dim a parameter is split, by itself."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_models import tree_of
from torch import nn

from graphshard.placement import COPIES, MIN_BYTES, split_dim
from graphshard.plan import ParamLayout
from graphshard.planner import make_plan
from graphshard.policy import BlockPolicy

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
