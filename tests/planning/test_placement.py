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
from torch.distributed.tensor import Shard

import graphshard
from graphshard.errors import VerifyError
from graphshard.planning.layout import ParamLayout
from graphshard.planning.planner import make_plan
from graphshard.policy.placement import MAX_PADDING, MIN_PADDING, split_along, stored_numel
from graphshard.policy.units import BlockPolicy
from graphshard.program import ops
from graphshard.program.storages import live_unsharded, storages_of
from graphshard.program.text import full_text
from graphshard.runtime.calls import Fingerprint
from graphshard.runtime.shards import part_of, put_together, take_apart, without_padding

SHAPES = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 3000)), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(shape=SHAPES, itemsize=st.sampled_from([1, 2, 4, 8]), ranks=st.integers(1, 1100))
@example(shape=[8, 1024, 4096], itemsize=2, ranks=64)
@example(shape=[8, 1025, 4097], itemsize=2, ranks=64)
@example(shape=[768, 768], itemsize=4, ranks=1000)
def test_the_first_split_that_pads_little_is_chosen_or_the_one_that_pads_least(
    shape, itemsize, ranks
):
    along = split_along(shape, itemsize, ranks)
    numel = prod(shape)
    allowed = max(MAX_PADDING * numel * itemsize, MIN_PADDING)

    def padding(way):
        return (stored_numel(shape, way, ranks) - numel) * itemsize

    dims = {dim: padding(dim) for dim in range(len(shape))}
    pairs = [
        padding(((first, ranks // parts), (second, parts)))
        for first, second in itertools.combinations(range(len(shape)), 2)
        for parts in range(2, ranks)
        if ranks % parts == 0
    ]
    if dims[0] <= allowed:
        assert along == 0
    elif min(dims.values()) <= allowed or not pairs or min(dims.values()) <= min(pairs):
        assert along == min(dims, key=dims.__getitem__)
    else:
        assert padding(along) == min(pairs)


@st.composite
def layouts(draw):
    """A parameter that is split along one dim or two, in any way."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    parts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=min(2, len(shape))))
    dims = sorted(draw(st.permutations(range(len(shape))))[: len(parts)])
    along = dims[0] if len(dims) == 1 else tuple(zip(dims, parts, strict=True))
    return ParamLayout("p", ("p",), shape, torch.float32, True, "shard", prod(parts), along)


@given(layout=layouts())
def test_the_parts_make_up_the_parameter(layout):
    whole = torch.arange(layout.numel, dtype=torch.float32).view(layout.shape)
    by_rank = take_apart(whole, layout)
    assert by_rank.shape == (layout.world_size, layout.shard_numel)
    seen = 0
    for rank, stored in enumerate(by_rank):
        part = without_padding(stored, layout.part_shape(rank))
        assert torch.equal(part, part_of(whole, layout, rank))
        assert not stored[part.numel() :].any()
        seen += part.numel()
    assert seen == layout.numel
    assert torch.equal(put_together(by_rank, torch.empty_like(whole), layout), whole)
    assert layout.full_bytes == layout.world_size * layout.shard_bytes
    assert layout.padding_bytes == layout.full_bytes - 4 * layout.numel
    if layout.is_prefix:
        flat = by_rank.view(layout.gathered_shape)[: layout.shape[0]]
        assert torch.equal(flat, whole)


@given(layout=layouts())
def test_parts_are_those_of_a_dtensor(layout):
    shape = tuple(parts for _, parts in layout.cuts)
    placements = [Shard(dim) for dim, _ in layout.cuts]
    for rank in range(layout.world_size):
        index = [int(i) for i in torch.unravel_index(torch.tensor(rank), shape)]
        expected, offsets = list(layout.shape), [0] * len(layout.shape)
        for each, placement, parts in zip(index, placements, shape, strict=True):
            size, offset = placement.local_shard_size_and_offset(
                layout.shape[placement.dim], parts, each
            )
            expected[placement.dim], offsets[placement.dim] = size, offset
        assert layout.part_shape(rank) == tuple(expected)
        for dim, start, stop in layout.part(rank):
            assert stop == start or start == offsets[dim]


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
    ("shape", "ranks", "said"),
    [
        ((8, 255, 257), 64, "dim 1: experts.w [8, 255, 257]"),
        ((8, 96, 96), 64, "dims 1 x 2 in 32 x 2: experts.w [8, 96, 96]"),
        (
            (75, 75, 75),
            61,
            "padding: 38.5% of what is gathered (1.01 MiB of 2.62 MiB), most in experts.w "
            "[75, 75, 75] over 61 ranks",
        ),
    ],
)
def test_what_no_dim_divides_is_split_along_another_or_two_or_padded_and_the_plan_says_so(
    shape, ranks, said
):
    assert said in str(make_plan(moe(*shape), BlockPolicy("Module"), world_size=ranks))


def test_small_parameters_stay_as_fsdp2_has_them():
    plan = make_plan(moe(2, 64, 64), BlockPolicy("Module"), world_size=4)
    assert plan.layouts["experts.w"].dim == 0
    assert plan.layouts["experts.w"].shard_shape == (1, 64, 64)


# -- programs ----------------------------------------------------------------------------------


def planned(world_size, **fields):
    with torch.device("meta"):
        made, inputs = MoE(), (torch.zeros(6, dtype=torch.int64),) * 2
    policy = BlockPolicy({Experts}, merge_below=0, **fields)
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
    program = planned(4, reshard_after_forward=True).program  # as within a budget
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
