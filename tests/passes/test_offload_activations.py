"""Activations wait on the host: which, when, and that they are back in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy_programs as toys
from torch import Tensor, nn
from toy_programs import BATCH, WIDTH, named, offloaded

import graphshard
from graphshard.passes.offload_activations import OffloadActivations
from graphshard.pipeline import default_passes, run_passes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.aliases import storage_root
from graphshard.program.cut import saved_nodes
from graphshard.program.program import BACKWARD, Program
from graphshard.program.text import schedule_text

ACTIVATIONS = "activations"


def kept_on_device(program: Program) -> list[str]:
    """What forward computes, crosses the border, and is no view of a parameter or host copy."""
    return [node.name for node in saved_nodes(program) if ops.is_compute(storage_root(node))]


@pytest.mark.parametrize("build", toys.UNITS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"backward_prefetch": "post", "forward_prefetch": 1},
        {"backward_prefetch": None},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "NO_SHARD"},
        {"reshard_root": True},
        {"reshard_after_forward": 2},
    ],
    ids=str,
)
def test_every_activation_leaves_and_the_values_stay(
    build: Callable[..., Program], fields: dict[str, Any]
) -> None:
    program, plan = offloaded(build, **fields)
    toys.assert_same_values(build(), program, plan)
    assert not kept_on_device(program)
    assert kept_on_device(toys.rewritten(build, Policy(**fields))[0])


def test_schedule(golden: Callable[[str, str], None]) -> None:
    golden("schedule_offload_activations.txt", schedule_text(offloaded(toys.blocks)[0]))


def steps_ahead(program: Program) -> list[int]:
    """For each copy to the device, how many runs of layers start between it and its arrival."""
    found = []
    nodes = list(program.graph.nodes)
    for copy in (n for n in nodes if n.target is ops.to_device):
        (arrival,) = copy.users
        between = nodes[nodes.index(copy) : nodes.index(arrival)]
        computes = [n.meta["unit"] for n in between if ops.is_compute(n)]
        found.append(len(dict.fromkeys(computes)))
    return found


def test_copies_come_back_a_step_ahead() -> None:
    assert max(steps_ahead(offloaded(toys.blocks, backward_prefetch="pre")[0])) == 1
    assert steps_ahead(offloaded(toys.blocks, backward_prefetch=None)[0]) == [0] * 7
    # After the compute of the step before it: nothing but its reduce is in between.
    program, _ = offloaded(toys.blocks, backward_prefetch="post")
    assert steps_ahead(program) == [0] * 7
    copy = named(program, "relu_default_1_to_device")
    assert copy.next.target is not ops.arrive
    scatter = named(program, "layers_2_reduce_scatter")
    assert sorted([copy, scatter]) == [copy, scatter]


def test_what_is_small_stays() -> None:
    policy = Policy(offload=ACTIVATIONS)
    program = toys.blocks()
    plan = toys.make_toy_plan(program, toys.UNITS[toys.blocks], policy)
    bound = BATCH * 8 * 4  # the hidden values of a block
    passes = [
        dataclasses.replace(step, min_bytes=bound) if isinstance(step, OffloadActivations) else step
        for step in default_passes(policy)
    ]
    run_passes(program, plan, passes)
    sent = [node.args[0] for node in program.nodes() if node.target is ops.to_host]
    assert {tuple(node.meta["val"].shape) for node in sent} == {(BATCH, 8)}
    assert len(kept_on_device(program)) == 4


@pytest.mark.parametrize(("device", "smallest"), [("cpu", 1 << 12), ("cuda", 1 << 20)])
def test_the_default_bound_is_what_the_link_is_worth(device: str, smallest: int) -> None:
    hidden = 256
    sent = {}
    for rows in (smallest // (4 * hidden) - 1, smallest // (4 * hidden)):
        plan = graphshard.plan(
            nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1)),
            graphshard.BlockPolicy({nn.Linear}, offload="activations"),
            example_inputs=(torch.zeros(rows, 1),),
            device=device,
        )
        assert plan.program is not None
        sent[rows * hidden * 4] = sum(n.target is ops.to_host for n in plan.program.nodes())
    assert sent[smallest] > 0
    assert device == "cpu" or sent[smallest - 4 * hidden] == 0


class Attention(nn.Module):
    """Saves three views of one projection, one of them twice, and the projection's input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.drop(q @ k.transpose(-1, -2)) @ v + x * q


class TwoOutputs(nn.Module):
    """Returns a value that backward reads as well, and counts in a buffer that it reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Attention(), Attention())
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x) * self.scale.clone())
        self.scale.mul_(2)
        return hidden.square().mean(), hidden


def planned(model: nn.Module, x: Tensor, **fields: Any) -> Program:
    policy = graphshard.BlockPolicy({Attention}, **fields)
    plan = graphshard.plan(model, policy, world_size=2, example_inputs=(x,), device="cpu")
    assert plan.program is not None
    return plan.program


def test_a_storage_is_copied_once_and_its_views_are_made_again() -> None:
    program = planned(TwoOutputs(), torch.randn(2, 64, WIDTH), offload=ACTIVATIONS)
    sent = [node.args[0] for node in program.nodes() if node.target is ops.to_host]
    roots = [storage_root(value) for value in sent]
    assert len(set(roots)) == len(roots)
    projections = [r for r in roots if r.meta["val"].shape[-1] == 3 * WIDTH]
    assert len(projections) == 2
    dtypes = {value.meta["val"].dtype for value in sent}
    assert dtypes == {torch.float32, torch.bool}, "masks go too"
    split = [n for n in program.nodes(BACKWARD) if "split" in n.name or "slice" in n.name]
    assert split, "the views are made again in backward"


def test_outputs_and_buffers_stay_right() -> None:
    torch.manual_seed(0)
    model, x = TwoOutputs(), torch.randn(2, 64, WIDTH)
    results = []
    for offload in (None, ACTIVATIONS):
        policy = graphshard.BlockPolicy({Attention}, offload=offload)
        sharded = graphshard.compile(model, policy)
        torch.manual_seed(3)
        loss, hidden = sharded(x)
        if offload:
            with torch.no_grad():
                hidden.detach().zero_()  # its copy on the host is what backward reads
        loss.backward()
        results.append([p.grad for p in sharded.parameters()] + [sharded.scale])
    for plain, copied in zip(*results, strict=True):
        assert torch.equal(plain, copied)
