"""Parameters and gradients on the host: the copies, where they stand, and what verify says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_programs as toys
from torch import nn
from toy_programs import offloaded

import graphshard
from graphshard.errors import PassError
from graphshard.inspect.dump import dump_program, schedule_graph
from graphshard.passes.offload_params import OffloadParams
from graphshard.pipeline import default_passes, run_passes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.program import Program
from graphshard.program.text import schedule_text

PARAMS = "params"
BOTH = ("params", "activations")


@pytest.mark.parametrize("build", toys.UNITS)
@pytest.mark.parametrize("offload", [PARAMS, BOTH], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"backward_prefetch": "post", "forward_prefetch": 1, "reshard_root": True},
        {"backward_prefetch": None, "strategy": "SHARD_GRAD_OP"},
        {"strategy": "NO_SHARD"},
    ],
    ids=str,
)
def test_parameters_come_and_gradients_go_and_the_values_stay(
    build: Callable[..., Program], offload: Any, fields: dict[str, Any]
) -> None:
    program, plan = offloaded(build, offload, **fields)
    toys.assert_same_values(build(), program, plan)
    for param, grad in zip(program.params, program.results().grads, strict=True):
        assert {user.target for user in param.node.users} <= {ops.to_device}
        if grad is not None:
            assert grad.target is ops.arrive
            assert grad.args[0].target is ops.to_host


@pytest.mark.parametrize("offload", [PARAMS, BOTH], ids=str)
def test_schedule(golden: Callable[[str, str], None], offload: Any) -> None:
    name = "params" if offload == PARAMS else "both"
    golden(f"schedule_offload_{name}.txt", schedule_text(offloaded(toys.blocks, offload)[0]))


def test_the_pass_runs_once() -> None:
    program, plan = toys.rewritten(toys.blocks)
    OffloadParams().apply(program, plan)
    with pytest.raises(PassError, match="is on the host already; run the pass once"):
        OffloadParams().apply(program, plan)


def test_plan_dump_and_dot_say_it(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    policy = graphshard.BlockPolicy({nn.Linear}, offload=PARAMS)
    plan = graphshard.plan(model, policy, world_size=2, example_inputs=(torch.randn(2, 64),))
    assert "host: 24.38 KiB of parameters per rank lie there" in str(plan)
    assert plan.program is not None
    assert "note: parameters and gradients: " in str(plan.program)
    dump_program(plan.program, plan, tmp_path)
    forward = (tmp_path / "forward.py").read_text()
    assert "parameter 0.weight, this rank's shard, on the host" in forward
    assert "to_device(p_0_weight, unit = '0', param = '0.weight')" in forward
    graph = schedule_graph(plan.program)
    streams = {data["op"]: data["stream"] for _, data in graph.nodes(data=True)}
    assert streams["to_device"] == streams["to_host"] == "copy"
    assert streams["arrive"] == "compute"
    with_both = graphshard.plan(model, graphshard.BlockPolicy({nn.Linear}), world_size=2)
    assert "host:" not in str(with_both)


def test_forward_only() -> None:
    policy = Policy(offload=BOTH)
    program = toys.blocks(grad=False)
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks], policy)
    run_passes(program, plan, default_passes(policy))
    assert {n.target for n in program.nodes() if ops.is_transfer(n)} == {ops.to_device, ops.arrive}


def test_ignored_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = graphshard.BlockPolicy({nn.Linear}, offload=PARAMS, ignored="0")
    sharded = graphshard.compile(model, policy)
    sharded(torch.randn(2, 8)).sum().backward()
    moved = {n.kwargs["param"] for n in sharded.program.nodes() if n.target is ops.to_device}
    assert moved == {"1.weight", "1.bias"}
    assert all(param.grad is not None for param in sharded.parameters())
