"""all_reduce_small: which units are averaged by one all_reduce, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy_programs import assert_same_values, blocks, odd_params, rewritten

import graphshard
from graphshard import BlockPolicy, Hardware, MixedPrecision, ops
from graphshard.cost.memory import BUFFERS, buffers_of
from graphshard.errors import PassError
from graphshard.passes.all_reduce_small import AllReduceSmall
from graphshard.planning.plan import ShardingPlan
from graphshard.policy import Policy
from graphshard.program.program import Program


def reduces(program: Program) -> dict[str, str]:
    """The op that averages each unit's gradients."""
    return {
        str(node.meta["unit"]): str(ops.op_name(node))
        for node in program.nodes()
        if node.target in ops.REDUCES
    }


def block_bytes() -> int:
    _, plan = rewritten(blocks)
    layouts = plan.unit("layers.0").layouts
    return sum(layout.numel * layout.dtype.itemsize for layout in layouts)


def test_units_below_the_bound_are_averaged_by_all_reduce() -> None:
    size = block_bytes()
    program, plan = rewritten(blocks, Policy(all_reduce_below=size))
    assert set(reduces(program).values()) == {"reduce_scatter"}
    program, plan = rewritten(blocks, Policy(all_reduce_below=size + 1))
    assert reduces(program)["layers.0"] == "all_reduce_shard"
    assert reduces(program)[""] == "reduce_scatter"  # embedding and head
    assert f"all_reduce_below={size + 1}" in str(plan)
    assert "all_reduce_shard" in str(program)
    assert plan.to_dict()["policy"]["all_reduce_below"] == size + 1


def test_bytes_count_in_the_dtype_of_the_reduce() -> None:
    size = block_bytes()
    half = MixedPrecision(reduce_dtype=torch.bfloat16)
    program, _ = rewritten(blocks, Policy(all_reduce_below=size // 2 + 1, mixed_precision=half))
    assert reduces(program)["layers.1"] == "all_reduce_shard"


@pytest.mark.parametrize("build", [blocks, odd_params])
def test_values_are_the_same(build: Any) -> None:
    program, plan = rewritten(build, Policy(all_reduce_below=1 << 30))
    assert "all_reduce_shard" in reduces(program).values()
    assert_same_values(build(), program, plan)


def test_over_replicas_shards_are_averaged_as_before() -> None:
    policy = Policy(strategy="HYBRID_SHARD", all_reduce_below=1 << 30)
    program, _ = rewritten(blocks, policy, mesh=(2, 4))
    counts = [ops.op_name(node) for node in program.nodes() if node.target in ops.REDUCES]
    assert counts.count("all_reduce_shard") == counts.count("all_reduce") == 4


def test_a_single_rank_has_nothing_to_gain() -> None:
    program, _ = rewritten(blocks, Policy(all_reduce_below=1 << 30), world_size=1)
    assert "all_reduce_shard" not in reduces(program).values()


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(PassError, match="below must be 1 byte or more; got 0"):
        AllReduceSmall(0)


class Small(nn.Module):
    """Blocks whose gradients are far too small for the network."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.relu(part(x))
        return x.sum()


def planned(below: int, ranks: int) -> ShardingPlan:
    with torch.device("meta"):
        model = Small()
    policy = BlockPolicy({nn.Linear}, all_reduce_below=below, merge_below=0)
    return graphshard.plan(model, policy, world_size=ranks, example_inputs=(torch.ones(8, 64),))


def seconds(plan: ShardingPlan, hardware: Hardware, op: str) -> float:
    """Seconds of one collective, with nothing else on the network."""
    transfers = graphshard.simulate(plan, hardware=hardware).transfers
    return next(t.span.seconds for t in transfers if t.op == op)


def test_simulation_knows_that_small_messages_pay_latency() -> None:
    hardware = Hardware.load("h100-sxm")
    scattered, whole = planned(0, 512), planned(1 << 20, 512)
    assert seconds(whole, hardware, "all_reduce_shard") < 0.5 * seconds(
        scattered, hardware, "reduce_scatter"
    )
    # Where bytes count, twice as many take longer.
    slow = hardware.with_(intra_bandwidth=1e5, inter_bandwidth=1e5)
    few = planned(0, 4), planned(1 << 20, 4)
    assert seconds(few[1], slow, "all_reduce_shard") > seconds(few[0], slow, "reduce_scatter")


def test_simulation_counts_the_copy_that_is_reduced() -> None:
    program = planned(1 << 20, 8).program
    assert program is not None
    copies = [
        storage.size
        for storage in buffers_of(program, "nccl")
        if storage.kind == BUFFERS and storage.node.target is ops.all_reduce_shard
    ]
    assert copies == [4 * (64 * 64 + 64)] * 4
