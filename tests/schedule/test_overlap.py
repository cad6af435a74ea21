"""Scheduling by cost: never slower in simulation than FSDP's order, never above its bytes."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import toy_programs as toys
from granularity import finer
from hypothesis import given, settings
from simulations import COUNTS, UNIT, score_of
from torch import nn

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard import Hardware, MixedPrecision, Policy
from graphshard.cost.streams import COMPUTE
from graphshard.cost.timeline import timeline_of
from graphshard.errors import PassError, VerifyError
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.overlap import Overlap
from graphshard.passes.skip_reshard import SkipReshard
from graphshard.pipeline import default_passes, run_passes
from graphshard.program import ops
from graphshard.program.aliases import is_view_op
from graphshard.program.annotations import Budget
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program
from graphshard.schedule import search
from graphshard.schedule.clusters import ComputeBetween
from graphshard.schedule.evaluate import OrderScorer, least_bytes
from graphshard.schedule.jobs import JobTable
from graphshard.schedule.list_scheduler import MINIMAL, Rule, place
from graphshard.schedule.search import SLACK, BestOrder, best_order


def scheduled(build: Any, **fields: Any) -> Any:
    """The program of a toy in the order that `Overlap` finds, and its plan."""
    policy = Policy(schedule="overlap", **fields)
    return toys.rewritten(build, policy, passes=alone(policy))


def alone(policy: Policy) -> list[Pass]:
    """The passes of `policy` without those that change what is gathered and reduced together."""
    others = (SkipReshard, MergeGathers)
    return [step for step in default_passes(policy) if not isinstance(step, others)]


def test_the_budget_is_what_fsdp_s_order_needs_and_is_shown() -> None:
    program, plan = scheduled(toys.blocks)
    plain, _ = toys.rewritten(toys.blocks, Policy())
    plain.budget = program.budget
    assert program.budget.bytes == score_of(plain, plan).bytes
    assert f"holds at most {program.budget.bytes:,} bytes at once" in str(program)
    assert "timed on cpu-gloo" in str(program)
    program, plan = scheduled(toys.blocks, hardware=UNIT)
    data = replace(plan, program=program).to_dict()["schedule"]
    assert data["budget_bytes"] == program.budget.bytes
    assert (data["hardware"], data["of_policy"], data["kept"]) == ("unit", False, None)
    given, _ = scheduled(toys.blocks, memory_budget=10**6, hardware="h200")
    assert "timed on h200, holds at most 1,000,000 bytes at once (memory_budget)" in str(given)


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (GPTConfig(layers=8, width=512, heads=4), 64),  # small units are merged
        (GPTConfig(vocab=2000, layers=2, width=4096, heads=8), 8),  # parts hold the most bytes
    ],
    ids=["small", "large"],
)
def test_it_does_not_end_behind_the_default(config: GPTConfig, ranks: int) -> None:
    with torch.device("meta"):
        model = GPT(config)
    batch = torch.zeros(2, 4, 128, dtype=torch.int64)
    mixed = MixedPrecision(torch.bfloat16, torch.float32)
    by_default, by_cost = (
        graphshard.simulate(
            graphshard.plan(
                model,
                graphshard.BlockPolicy({Block}, mixed_precision=mixed, **fields),
                world_size=ranks,
                example_inputs=tuple(batch),
            ),
            hardware="h100-sxm",
        )
        for fields in ({}, {"schedule": "overlap", "hardware": "h100-sxm"})
    )
    assert by_cost.step_seconds <= by_default.step_seconds * (1 + 1e-9)
    assert by_cost.peak_bytes <= by_default.peak_bytes


def test_scheduling_needs_a_budget() -> None:
    program, plan = toys.rewritten(toys.blocks, Policy())
    with pytest.raises(PassError, match="run SetBudget"):
        Overlap().apply(program, plan)


# -- what is found ---------------------------------------------------------------------------------


def test_the_schedule(golden: Any) -> None:
    golden(
        "schedule_overlap.txt", str(scheduled(toys.blocks, hardware=UNIT, memory_budget=2300)[0])
    )


def times(program: Program, plan: Any, hardware: Hardware) -> tuple[float, float]:
    """Seconds of the step, and of its compute alone."""
    timeline = timeline_of(program, plan, hardware)
    return timeline.seconds, sum(s.seconds for s in timeline.spans if s.stream == COMPUTE)


def test_nothing_is_exposed_that_need_not_be() -> None:
    # A collective of four ranks takes 1 + 3 seconds, whatever it moves. The root is gathered before
    # anything can be computed; behind it the first block, of which one second hides behind the
    # embedding. At the end the root is reduced, behind the last block, of which as much hides.
    program, plan = scheduled(toys.blocks, hardware=UNIT)
    step, compute = times(program, plan, UNIT)
    assert step == compute + 4 + 3 + 3 + 4
    # Without backward FSDP's order holds a block at a time; more must be allowed.
    policy = Policy(schedule="overlap", hardware=UNIT, memory_budget=10**6)
    forward, plan = toys.rewritten(toys.blocks, policy, passes=alone(policy), grad=False)
    step, compute = times(forward, plan, UNIT)
    assert step == compute + 4 + 3


def test_where_nothing_can_be_hidden_frees_alone_move() -> None:
    # Compute stands still while anything is communicated.
    machine = UNIT.with_(contention=1.0)
    plain, _ = toys.rewritten(toys.blocks, Policy(backward_prefetch=None))
    program, plan = scheduled(toys.blocks, hardware=machine)
    step, _ = times(program, plan, machine)
    assert step == times(plain, plan, machine)[0]
    assert program.budget is not None
    assert score_of(program, plan).bytes < program.budget.bytes


def large_blocks() -> Program:
    names = [f"layers.{i}" for i in range(4)]
    params = {k: v for name in names for k, v in toys.block_params(name, 64).items()}
    toy = toys.Toy({"embed.weight": (toys.VOCAB, toys.WIDTH), **params})
    toy.tangent(toys.BATCH, toys.WIDTH)
    x = toy.embedding("embed.weight")
    for name in names:
        x = toy.block(x, name)
    return toy.finish(x)


def wide_and_lean(program: Program, plan: Any, patch: pytest.MonkeyPatch) -> list[BestOrder]:
    """The best order, however little it gains: as it is found, and as it is taken."""
    assert program.budget is not None
    patch.setattr(search, "GAIN", 0.0)
    lean = best_order(program, plan, program.budget)

    def as_found(order: Any, _: float, table: Any, scorer: OrderScorer, *rest: Any) -> Any:
        return order, scorer.score(order)

    with patch.context() as inner:
        inner.setattr(search, "order_holding_less", as_found)
        return [best_order(program, plan, program.budget), lean]


def test_of_orders_that_take_as_long_the_one_that_holds_least_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compute stands still while anything is communicated, so nothing need be gathered ahead.
    policy = Policy(schedule="overlap", hardware=UNIT.with_(contention=1.0), memory_budget=10**6)
    program = large_blocks()
    plan = toys.make_toy_plan(program, ["", *(f"layers.{i}" for i in range(4))], policy)
    run_passes(program, plan, alone(policy)[:-1])
    assert program.budget is not None
    wide, lean = wide_and_lean(program, plan, monkeypatch)
    assert lean.sharding < wide.sharding
    assert lean.score.bytes <= wide.score.bytes
    assert lean.score.seconds <= wide.score.seconds * (1 + SLACK)
    Overlap().apply(program, plan)
    assert program.budget.sharding == lean.sharding
    assert f"{lean.sharding:,} for sharding" in str(program)
    assert program.budget.to_dict()["sharding_bytes"] == lean.sharding


def test_an_order_that_holds_less_is_as_fast_where_transfers_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = UNIT.with_(intra_bandwidth=1e3, flops={"float32": 1e3})
    policy = Policy(schedule="overlap", hardware=hardware, memory_budget=10**6)
    program = large_blocks()
    plan = toys.make_toy_plan(program, ["", *(f"layers.{i}" for i in range(4))], policy)
    run_passes(program, plan, alone(policy)[:-1])
    assert program.budget is not None
    scorer = OrderScorer.of(program, plan, program.budget)
    wide, lean = (
        scorer.seconds(best.order, 2.0) for best in wide_and_lean(program, plan, monkeypatch)
    )
    assert lean <= wide * (1 + SLACK)


def test_fsdp_s_order_stays_where_the_gain_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = finer(toys.blocks, policy=Policy(), hardware=COUNTS)
    assert program.budget is not None
    before, best = score_of(program, plan), best_order(program, plan, program.budget)
    gain = 1 - best.score.seconds / before.seconds
    assert gain > search.GAIN
    monkeypatch.setattr(search, "GAIN", gain + 1e-6)
    kept = best_order(program, plan, program.budget)
    assert kept.score.seconds == pytest.approx(before.seconds)
    collectives = [node for node in program.nodes() if ops.is_collective(node)]
    assert [node for node in kept.order if ops.is_collective(node)] == collectives


@pytest.mark.parametrize(
    ("build", "ahead"), [(toys.blocks, 1), (toys.back_and_forth, 0)], ids=["blocks", "back"]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_it_is_as_fast_as_fsdp_s_order_where_transfers_are_late(
    build: Any, ahead: int, strategy: str
) -> None:
    policy = Policy(strategy=strategy, forward_prefetch=ahead)
    program, plan = finer(build, policy=policy, hardware=COUNTS)
    assert program.budget is not None
    scorer = OrderScorer.of(program, plan, program.budget)
    order = best_order(program, plan, program.budget).order
    late = scorer.seconds(list(program.graph.nodes), 2.0)
    assert scorer.seconds(order, 2.0) <= late * (1 + SLACK)


def test_a_budget_is_kept_at_the_price_of_time() -> None:
    with pytest.raises(VerifyError, match=r"memory_budget=1,000 .*(?s:.*)after pass 'overlap'"):
        scheduled(toys.blocks, hardware=UNIT, memory_budget=1000)
    plain, plan = toys.rewritten(toys.blocks, Policy(backward_prefetch=None))
    plain.budget = Budget(0, UNIT, of_policy=True)
    least = 1968  # what FSDP's order cannot do with
    assert score_of(plain, plan).bytes > least
    found = []
    for more in (0, 100, 300, 1000):
        program, plan = scheduled(toys.blocks, hardware=UNIT, memory_budget=least + more)
        score = score_of(program, plan)
        assert score.bytes <= least + more
        found.append(score.seconds)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_where_everything_takes_long_communication_never_stands_still() -> None:
    # Compute is hundreds of times faster than any gather: the step is what the network takes.
    slow = UNIT.with_(name="slow", flops={"float32": 1e9}, intra_latency=1000.0)
    program, plan = scheduled(toys.blocks, hardware=slow, memory_budget=10**6)
    step, compute = times(program, plan, slow)
    network = sum(t.span.seconds for t in timeline_of(program, plan, slow).transfers)
    assert network < step < network + compute


@pytest.mark.parametrize("build", [toys.blocks, toys.nested, toys.shared_block, toys.odd_params])
@pytest.mark.parametrize(
    "fields",
    [
        {"reshard_root": True},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "SHARD_OPTIMIZER"},
        {"strategy": "NO_SHARD"},
        {"strategy": "HYBRID_SHARD", "offload": "params"},
        {"reshard_after_forward": 2, "offload": "activations"},
        {"recompute": "units"},
    ],
    ids=str,
)
def test_every_option_is_scheduled_and_keeps_its_values(build: Any, fields: dict[str, Any]) -> None:
    mesh = (2, 2) if fields.get("strategy") == "HYBRID_SHARD" else None
    plain, _ = toys.rewritten(build, Policy(forward_prefetch=1, **fields), mesh=mesh)
    policy = Policy(schedule="overlap", hardware=UNIT, **fields)
    program, plan = toys.rewritten(build, policy, mesh=mesh, passes=alone(policy))
    require_no_worse(plain, program, plan)


def require_no_worse(plain: Program, program: Program, plan: Any) -> None:
    plain.budget = program.budget
    before, now = score_of(plain, plan), score_of(program, plan)
    assert now.seconds <= before.seconds * (1 + 1e-9)
    assert now.bytes <= before.bytes
    assert [n.name for n in program.nodes() if n.target not in MOVED] == [
        n.name for n in plain.nodes() if n.target not in MOVED
    ], "compute keeps its order"


MOVED = toys.ops.VOCABULARY | {getitem}


# -- by chance -------------------------------------------------------------------------------------


@st.composite
def chains(draw: Any) -> Any:
    """A chain of blocks of random sizes, some used again; its units, a machine and a budget."""
    sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    walked = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=6))
    tail = draw(st.booleans())

    def build() -> Program:
        params = {"embed.weight": (toys.VOCAB, toys.WIDTH)}
        for i in sorted(set(walked)):
            params |= toys.block_params(f"layers.{i}", sizes[i])
        if tail:
            params["head.weight"] = (toys.VOCAB, toys.WIDTH)
        toy = toys.Toy(params)
        toy.tangent(toys.BATCH, toys.VOCAB if tail else toys.WIDTH)
        x = toy.embedding("embed.weight")
        for i in walked:
            x = toy.block(x, f"layers.{i}")
        return toy.finish(toy.linear(x, "head.weight") if tail else x)

    units = ["", *(f"layers.{i}" for i in sorted(set(walked)) if draw(st.integers(0, 4)))]
    speed = st.sampled_from([1.0, 10.0, 1000.0])
    machine = UNIT.with_(
        flops={"float32": draw(speed)},
        intra_bandwidth=draw(speed),
        intra_latency=draw(speed),
        memory_bandwidth=draw(speed),
    )
    return build, units, machine, draw(st.sampled_from([None, 0.0, 0.5, 1.5]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(chains(), st.sampled_from([{}, {"reshard_root": True}, {"strategy": "SHARD_GRAD_OP"}]))
def test_chains_are_never_slower_never_larger_and_one_sequence(
    chain: Any, fields: dict[str, Any]
) -> None:
    build, units, machine, part = chain

    def made(**more: Any) -> tuple[Program, Any]:
        program = build()
        plan = toys.make_toy_plan(program, units, Policy(**fields, **more))
        run_passes(program, plan, alone(plan.policy))
        return program, plan

    plain, plan = made()
    if part is not None:
        plain.budget = Budget(0, machine, of_policy=True)
        fields = fields | {"memory_budget": int(score_of(plain, plan).bytes * (1 + part))}
    program, plan = made(schedule="overlap", hardware=machine)
    if part is None:
        require_no_worse(plain, program, plan)
    else:
        assert score_of(program, plan).bytes <= fields["memory_budget"]
        plain.budget = program.budget
        assert score_of(program, plan).seconds <= score_of(plain, plan).seconds * (1 + 1e-9)
    again, _ = made(schedule="overlap", hardware=machine)
    assert str(again) == str(program), "every rank finds the same order"


@pytest.mark.parametrize("build", [toys.blocks, toys.nested, toys.back_and_forth])
@pytest.mark.parametrize("fields", [{}, {"offload": "params"}, {"strategy": "HYBRID_SHARD"}])
def test_the_walk_and_the_simulation_agree(build: Any, fields: dict[str, Any]) -> None:
    mesh = (2, 2) if "strategy" in fields else None
    program, plan = toys.rewritten(build, Policy(**fields), mesh=mesh)
    machine = UNIT.with_(contention=0.25)
    program.budget = Budget(10**9, machine, of_policy=False)
    scorer = OrderScorer.of(program, plan, program.budget)
    table = JobTable.of(program, program.budget, scorer.cost)
    least = place(table, Rule(MINIMAL))
    held = least_bytes(least.order, scorer.lifetimes, table, program.budget)
    for placed in (least, place(table, Rule(), held)):
        assert sorted(placed.order) == list(program.graph.nodes), "none is lost, none twice"
        for node in placed.order[:-1]:
            program.output_node.prepend(node)
        timeline = timeline_of(program, plan, machine)
        assert placed.seconds == pytest.approx(timeline.seconds)
        assert scorer.score(placed.order) == score_of(program, plan), (
            "for the order, and once in it"
        )
    assert placed.bytes >= score_of(program, plan).bytes * 0.8


@pytest.mark.parametrize("unit", ["", "layers.0", "layers.2", "nowhere"])
def test_whether_other_units_compute_between_two_places(unit: str) -> None:
    program, _ = toys.rewritten(toys.blocks)
    between = ComputeBetween(program)
    nodes = list(program.graph.nodes)
    for start in range(0, len(nodes), 7):
        for stop in range(start, len(nodes), 5):
            others = [
                n
                for n in nodes[start:stop]
                if ops.is_compute(n) and not is_view_op(n.target) and n.meta["unit"] != unit
            ]
            assert between.others(unit)(start, stop) == bool(others)


class Norms(nn.Module):
    """Parameters of a few bytes, used far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def test_the_search_ends_where_sharding_holds_a_few_bytes() -> None:
    policy = graphshard.BlockPolicy({nn.LayerNorm}, schedule="overlap", hardware="h100-sxm")
    with torch.device("meta"):  # which the tensors of the search are not made on
        plan = graphshard.plan(Norms(), policy, world_size=2, example_inputs=(torch.ones(2, 2),))
    assert plan.program is not None
    assert plan.program.budget is not None
    assert 0 < plan.program.budget.sharding < 64
