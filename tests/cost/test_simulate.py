"""What can be simulated, and what is said of what cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toy_programs as toys

import graphshard
from examples.gpt import GPT, GPTConfig
from graphshard import CostError
from graphshard.policy.units import Policy

TOKENS = torch.zeros(2, 32, dtype=torch.int64)
BLOCKS = graphshard.BlockPolicy(["Block"])
COMMON = {"hardware": "h100-sxm"}


def gpt(**options):
    with torch.device("meta"):
        return GPT(GPTConfig(vocab=64, layers=2, heads=2, width=64, **options))


def same(one, other):
    return (one.step_seconds, one.exposed_seconds, one.peak_bytes, one.valley_bytes) == (
        other.step_seconds,
        other.exposed_seconds,
        other.peak_bytes,
        other.valley_bytes,
    )


STRATEGIES = {
    "full_shard": ({}, (4,)),
    "grad_op": ({"strategy": "SHARD_GRAD_OP"}, (4,)),
    "zero1": ({"strategy": "SHARD_OPTIMIZER"}, (4,)),
    "no_shard": ({"strategy": "NO_SHARD"}, (4,)),
    "hybrid": ({"strategy": "HYBRID_SHARD"}, (2, 2)),
    "parts": ({"reshard_after_forward": 2}, (4,)),
    "bf16": ({"mixed_precision": graphshard.MixedPrecision(torch.bfloat16, torch.float32)}, (4,)),
    "host": ({"offload": ("params", "activations")}, (4,)),
    "one rank": ({}, (1,)),
    "uneven": ({}, (3,)),
    "overlap": ({"schedule": "overlap", "hardware": "h100-sxm"}, (4,)),
}


SLOW = ("grad_op", "no_shard", "parts", "one rank", "uneven")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in STRATEGIES],
)
def test_a_program_alone_costs_what_it_does_with_its_plan(name):
    options, mesh = STRATEGIES[name]
    policy = graphshard.BlockPolicy(["Block"], **options)
    plan = graphshard.plan(gpt(), policy, mesh_shape=mesh, example_inputs=(TOKENS, TOKENS))
    with_plan = graphshard.simulate(plan, **COMMON)
    assert plan.program is not None
    assert same(with_plan, graphshard.simulate(plan.program, plan=plan, **COMMON))
    alone = graphshard.simulate(plan.program, **COMMON)
    assert same(with_plan, alone)
    assert {unit.fqn for unit in alone.units} == {unit.fqn for unit in plan.units}
    assert "4 ranks" in str(alone) or mesh in ((1,), (3,))


def test_a_captured_program_has_no_plan_to_simulate():
    program = toys.blocks()
    with pytest.raises(CostError, match="was rewritten by no plan; pass the plan"):
        graphshard.simulate(program, **COMMON)


def test_a_program_is_for_one_kind_of_device():
    plan = graphshard.plan(gpt(), BLOCKS, world_size=1, example_inputs=(TOKENS, TOKENS))
    with pytest.raises(CostError, match="is for cuda, and cpu-gloo runs programs for cpu"):
        graphshard.simulate(plan, hardware="cpu-gloo")
    with pytest.raises(CostError, match="is for cuda, and cpu-gloo runs programs for cpu"):
        graphshard.simulate(plan, **COMMON).with_hardware("cpu-gloo")


def test_a_model_and_its_plan_cost_the_same_however_they_are_given():
    inputs = {"example_inputs": (TOKENS, TOKENS)}
    whole = graphshard.plan(gpt(), BLOCKS, world_size=8, **inputs)
    bare = graphshard.plan(gpt(), BLOCKS, world_size=8)
    expected = graphshard.simulate(whole, **COMMON)
    asked = [
        graphshard.simulate(gpt(), policy=BLOCKS, world_size=8, **inputs, **COMMON),
        graphshard.simulate(gpt(), BLOCKS, world_size=8, **inputs, **COMMON),
        graphshard.simulate(gpt(), plan=bare, **inputs, **COMMON),
        graphshard.simulate(bare, model=gpt(), **inputs, **COMMON),
    ]
    assert all(same(expected, estimate) for estimate in asked)


def test_a_sharded_module_is_simulated_by_the_program_that_trains():
    host = {"hardware": "cpu-gloo"}
    model = GPT(GPTConfig(vocab=64, layers=2, heads=2, width=64))
    sharded = graphshard.compile(model, BLOCKS)
    with pytest.raises(CostError, match="has captured no program yet; give example_inputs"):
        graphshard.simulate(sharded, **host)
    sharded(TOKENS, TOKENS).backward()
    with torch.no_grad():
        sharded(TOKENS, TOKENS)
    training, inference = sharded.programs
    assert same(
        graphshard.simulate(sharded, **host),
        graphshard.simulate(training, plan=sharded.plan, **host),
    )
    chosen = graphshard.simulate(inference, plan=sharded.plan, **host)
    assert chosen.peak_bytes < graphshard.simulate(sharded, **host).peak_bytes
    longer = graphshard.simulate(sharded, example_inputs=(TOKENS.tile(2, 1),) * 2, **host)
    assert longer.flops == 2 * graphshard.simulate(training, **host).flops
    assert len(sharded.programs) == 3


PROGRAM, PLAN = toys.rewritten(toys.blocks, Policy())
NOT_CAPTURED = graphshard.plan(torch.nn.Linear(2, 2), graphshard.SizePolicy(1), world_size=2)
OF_ANOTHER = graphshard.plan(gpt(), BLOCKS, world_size=4)


@pytest.mark.parametrize(
    ("what", "given", "said"),
    [
        ("model", {}, "takes a model, a program, a plan or a sharded module; got a str"),
        (torch.nn.Linear(2, 2), {"policy": BLOCKS}, "a call of it; give example_inputs"),
        (gpt(), {"example_inputs": ()}, "under a policy"),
        (gpt(), {"example_inputs": (), "policy": BLOCKS}, r"give world_size= \(1 for a single"),
        (gpt(), {"model": gpt()}, "model has no place in a simulation of a model"),
        (PLAN, {}, "made without example inputs; give them to graphshard.plan"),
        (NOT_CAPTURED, {"model": gpt()}, "made without example inputs"),
        (replace(PLAN, program=PROGRAM), {"policy": BLOCKS}, "policy has no place"),
        (replace(PLAN, program=PROGRAM), {"model": gpt()}, "the plan has a program"),
        (PROGRAM, {"world_size": 8}, "for the mesh it was rewritten for"),
        (PROGRAM, {"policy": BLOCKS}, "captured and rewritten already"),
        (PROGRAM, {"plan": NOT_CAPTURED}, r"for a mesh of shape \(2,\), the program for one of"),
        (PROGRAM, {"plan": OF_ANOTHER}, "the plan knows no parameter"),
        (PROGRAM, {"gpus_per_node": 0}, "gpus_per_node must be 1 rank or more; got 0"),
    ],
)
def test_what_cannot_be_simulated_is_named(what, given, said):
    with pytest.raises(CostError, match=said):
        graphshard.simulate(what, hardware="h200", **given)
