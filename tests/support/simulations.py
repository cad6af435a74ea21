"""Made-up machines whose times are counts, and toy programs simulated on them."""

from __future__ import annotations

from dataclasses import replace

import torch
import toy_programs as toys
from torch import fx

import graphshard
from graphshard.cost.memory import held_by_place
from graphshard.cost.timeline import timeline_of
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import Policy
from graphshard.program.annotations import Score
from graphshard.schedule.evaluate import budget_of

# One of everything a second, so that times are counts.
UNIT = Hardware(
    name="unit",
    flops={"float32": 1.0},
    memory_bytes=1000,
    memory_bandwidth=1e30,
    launch_floor=1.0,
    gpus_per_node=4,
    intra_bandwidth=1e30,
    intra_latency=1.0,
    inter_bandwidth=1e30,
    inter_latency=10.0,
    host_bandwidth=1.0,
)

COUNTS = UNIT.with_(flops={"float32": 1e30}, gpus_per_node=1024, host_bandwidth=1e30)


# Every operator takes a second, a gather as many seconds as it has bytes.
SLOW_NETWORK = COUNTS.with_(
    name="slow network",
    memory_bytes=1 << 40,
    gpus_per_node=8,
    intra_bandwidth=1.0,
    intra_latency=1e-9,
    inter_bandwidth=1.0,
    inter_latency=1e-9,
    host_bandwidth=1.0,
)


# A gather takes three hops of a hundred seconds, whatever it moves.
SLOW_HOPS = SLOW_NETWORK.with_(name="slow hops", intra_bandwidth=1e30, intra_latency=100.0)


def simulate(build=toys.blocks, *, slow=5.0, **options):
    program, plan = toys.rewritten(build, Policy(**options))
    return again(replace(plan, program=program), slow)


def again(plan, slow=5.0):
    hardware = COUNTS.with_(intra_latency=slow)
    return graphshard.simulate(plan, hardware=hardware)


def node_of(target, *shapes, args=None, dtype=torch.float32):
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(inputs, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    node = graph.call_function(target, tuple(inputs) + (args or ()))
    node.meta["val"] = target(*(n.meta["val"] for n in inputs), *(args or ()))
    return node


def score_of(program, plan):
    """The score of a finished `program`, counted as in its budget."""
    budget = budget_of(program)
    seconds = timeline_of(program, plan, budget.hardware).seconds
    return Score(seconds, max(held_by_place(program, budget)))
