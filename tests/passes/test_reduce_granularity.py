"""Reduces finer than a unit; and any row of passes that split, merge and keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import toy_programs as toys
from granularity import ALL_FINER, REDUCES, events, finer, gradient_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import SLOW_HOPS, SLOW_NETWORK, score_of
from toy_programs import BATCH, VOCAB, WIDTH, Toy

from graphshard.hardware.hardware import Hardware
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.overlap import Overlap
from graphshard.passes.split_ends import SplitEnds
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.pipeline import default_passes, run_passes
from graphshard.policy.units import Policy
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, Program
from graphshard.verify.rules import verify

# -- split_reduces -----------------------------------------------------------------------------


def test_the_head_s_gradient_is_reduced_where_it_is_ready() -> None:
    program, _ = finer(toys.blocks, REDUCES)
    assert events(program, BACKWARD, "reduce", "wait-reduce", "run") == (
        "run root, reduce head, run layers.2, wait-reduce head, reduce 2, run layers.1, "
        "wait-reduce 2, reduce 1, run layers.0, wait-reduce 1, reduce 0, run root, "
        "wait-reduce 0, reduce embed, wait-reduce embed"
    )
    plain, _ = finer(toys.blocks)
    # A block's and the head's (or the next block's), against two blocks' and the head's.
    assert (gradient_bytes(program), gradient_bytes(plain)) == (2 * 384, 2 * 384 + 240)


def test_averages_over_replicas_are_split_alike() -> None:
    policy = Policy(strategy="HYBRID_SHARD")
    program, _ = finer(toys.blocks, *ALL_FINER, policy=policy, mesh=(2, 2))
    assert events(program, BACKWARD, "reduce", "average", "wait-average") == (
        "reduce head, average head, reduce 2, average 2, reduce 1, average 1, reduce 0, "
        "average 0, reduce embed, average embed, wait-average 2, wait-average 1, wait-average 0, "
        "wait-average head, wait-average embed"
    )


def test_kept_gradients_are_kept_where_they_are_ready() -> None:
    program, _ = finer(toys.blocks, *ALL_FINER, mode=("gradient", (), ()), same=False)
    assert events(program, BACKWARD, "run", "accumulate_grad") == (
        "run root, accumulate_grad head, run layers.2, accumulate_grad 2, run layers.1, "
        "accumulate_grad 1, run layers.0, accumulate_grad 0, run root, accumulate_grad embed"
    )
    policy = Policy(strategy="HYBRID_SHARD")
    for mode, expected in (
        (
            ("shard", (), ()),
            "reduce head, accumulate_grad head, reduce 2, accumulate_grad 2, reduce 1, "
            "accumulate_grad 1, reduce 0, accumulate_grad 0, reduce embed, accumulate_grad embed",
        ),
        (
            (None, ("head.weight",), ("embed.weight",)),
            "add_accumulated head, reduce head, reduce 2, reduce 1, reduce 0, reduce embed, "
            "add_accumulated embed",
        ),
    ):
        program, _ = finer(
            toys.blocks, *ALL_FINER, policy=policy, mesh=(2, 2), mode=mode, same=False
        )
        assert events(program, BACKWARD, "reduce", "accumulate_grad", "add_accumulated") == expected


def test_gradients_are_cast_and_sent_to_the_host_as_before() -> None:
    policy = Policy(offload="params")
    program, _ = finer(toys.blocks, REDUCES, policy=policy)
    assert events(program, BACKWARD, "reduce", "to_host") == (
        "reduce head, to_host head, reduce 2, to_host 2, reduce 1, to_host 1, reduce 0, "
        "to_host 0, reduce embed, to_host embed"
    )


# -- together ----------------------------------------------------------------------------------


def two_heads() -> Program:
    """Two outputs, the second behind a block and a head of its own."""
    toy = Toy(
        {"embed.weight": (VOCAB, WIDTH)}
        | toys.block_params("a")
        | toys.block_params("b")
        | {"head.weight": (VOCAB, WIDTH)}
    )
    toy.tangent(BATCH, VOCAB)
    x = toy.embedding("embed.weight")
    x = toy.block(toy.block(x, "a"), "b")
    return toy.finish(toy.linear(x, "head.weight"))


@pytest.mark.parametrize("passes", [ALL_FINER, (*ALL_FINER, MergeGathers(500))], ids=len)
def test_an_output_without_a_gradient_drops_collectives_made_by_these_passes(passes: Any) -> None:
    program, plan = finer(two_heads, *passes, units=("", "a", "b"))
    drop = DropUnusedTangents(frozenset({0}))
    drop.apply(program, plan)
    verify(program, plan, after=drop.name)
    assert events(program, BACKWARD, "gather", "reduce") == ""


@st.composite
def programs(draw: st.DrawFn) -> tuple[Callable[[], Program], tuple[str, ...]]:
    """A toy that runs units in some order, the root's own parameters in between."""
    order = draw(st.lists(st.sampled_from("abcr"), min_size=1, max_size=6))
    tied = draw(st.booleans())
    frozen = draw(st.sets(st.sampled_from(["embed.weight", "head.weight", "a.up.weight"])))

    def build() -> Program:
        params: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH)}
        for name in sorted(set(order) - {"r"}):
            params |= toys.block_params(name, hidden=5)
        params |= {f"mix.{i}.weight": (WIDTH, WIDTH) for i, n in enumerate(order) if n == "r"}
        params |= {} if tied else {"head.weight": (VOCAB, WIDTH)}
        toy = Toy(params, frozen=tuple(frozen))
        toy.tangent(BATCH, VOCAB)
        x = toy.embedding("embed.weight")
        for index, name in enumerate(order):
            x = toy.linear(x, f"mix.{index}.weight") if name == "r" else toy.block(x, name)
        return toy.finish(toy.linear(x, "embed.weight" if tied else "head.weight"))

    return build, ("", *sorted(set(order) - {"r"}))


STEPS = st.one_of(
    st.builds(SplitGathers, alone=st.sampled_from([0, 200])),
    st.builds(SplitReduces, alone=st.sampled_from([0, 200])),
    st.builds(MergeGathers, share=st.integers(50, 500)),
    st.builds(SplitEnds, share=st.integers(1, 200)),
)


@given(
    programs(),
    st.lists(STEPS, min_size=1, max_size=4),
    st.sampled_from(["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"]),
    st.booleans(),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_row_of_these_passes_keeps_every_rule(
    program: tuple[Callable[[], Program], tuple[str, ...]],
    steps: list[Pass],
    strategy: str,
    stays: bool,
) -> None:
    build, units = program
    policy = Policy(strategy=strategy, merge_below=200 * stays)
    finer(
        build,
        *steps,
        Overlap(),
        policy=policy,
        mesh=(2, 2) if strategy == "HYBRID_SHARD" else (4,),
        units=units,
        hardware=SLOW_HOPS,
        may_stay=[u for u in units if u and stays and strategy != "SHARD_GRAD_OP"],
    )


@given(
    programs(),
    st.sampled_from([SLOW_HOPS, SLOW_NETWORK]),
    st.booleans(),
    st.sampled_from([0, 200, 1 << 20]),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_a_schedule_by_cost_is_never_slower_nor_larger(
    program: tuple[Callable[[], Program], tuple[str, ...]],
    hardware: Hardware,
    zero2: bool,
    merge_below: int,
) -> None:
    build, units = program
    fields: dict[str, Any] = {"merge_below": merge_below}
    fields |= {"strategy": "SHARD_GRAD_OP"} if zero2 else {}
    ahead = Policy(forward_prefetch=1, **fields)  # the default on NCCL
    plain, plan = finer(build, policy=ahead, units=units, hardware=hardware)
    policy = Policy(schedule="overlap", hardware=hardware, **fields)
    by_cost = build()
    run_passes(by_cost, plan, default_passes(policy))
    toys.assert_same_values(build(), by_cost, plan)
    before, now = score_of(plain, plan), score_of(by_cost, plan)
    assert now.seconds <= before.seconds * (1 + 1e-9)
    assert now.bytes <= before.bytes
