"""Backward gives back each large parameter behind its last use, ahead of its unit's free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import toy_programs as toys
from ranks import checks_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from examples.benchmarks.benchmark_models import TINY, Data, made
from examples.benchmarks.live_bytes import StepWatch, most_allocated
from examples.benchmarks.rival_systems import Setting, graphshard_step
from graphshard import pipeline
from graphshard.errors import PassError
from graphshard.passes.release_early import ReleaseEarly
from graphshard.pipeline import default_passes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.program import BACKWARD, Program
from graphshard.program.storages import PARAMETERS, live_unsharded, storages_of
from graphshard.program.text import schedule_text
from graphshard.torch_private import inductor as torch_inductor

ALL = ReleaseEarly(min_bytes=1)


def released(build: Callable[..., Program] = toys.blocks, **policy: Any) -> tuple[Program, Any]:
    chosen = toys.gathering_at_need(Policy(**policy))
    return toys.rewritten(build, chosen, passes=[*default_passes(chosen)[:-1], ALL])


def releases(program: Program) -> list[Any]:
    return [node for node in program.nodes() if node.target is ops.release]


def test_a_weight_goes_before_its_own_gradient_comes() -> None:
    program, _ = released()
    found = releases(program)
    assert {node.args[0].name for node in found} >= {"layers_1_up_weight_full_1"}
    for node in found:
        assert node.meta["phase"] == BACKWARD
        free = next(u for u in node.args[0].args[0].users if u.target is ops.free)
        assert node < free


def test_what_stays_since_forward_is_released_in_backward() -> None:
    program, _ = released(strategy="SHARD_GRAD_OP")
    found = {node.args[0].name for node in releases(program)}
    assert {"layers_0_up_weight_full", "layers_2_down_weight_full", "head_weight_full"} <= found
    assert all(node.meta["phase"] == BACKWARD for node in releases(program))
    policy = toys.gathering_at_need(Policy(strategy="SHARD_GRAD_OP"))
    steps = [*default_passes(policy)[:-1], ALL]
    alone, _ = toys.rewritten(toys.blocks, policy, world_size=1, passes=steps)
    assert not releases(alone)  # they are the shards


def test_bytes_follow_each_release() -> None:
    plain, _ = toys.rewritten(toys.blocks)
    program, _ = released()
    after = dict(live_unsharded(program))
    for node in releases(program):
        assert after[node] < after[node.prev]
    assert list(after.values())[-1] == list(dict(live_unsharded(plain)).values())[-1] == 0

    def parameters(program: Program) -> tuple[int, int]:
        held = [s for s in storages_of(program).all if s.kind == PARAMETERS]
        return sum(s.size for s in held), sum(s.size * (s.dies - s.born) for s in held)

    assert parameters(program)[0] == parameters(plain)[0]
    assert parameters(program)[1] < parameters(plain)[1]


def test_the_schedule_says_what_compute_releases() -> None:
    program, _ = released()
    lines = [line for line in schedule_text(program).splitlines() if "releases" in line]
    assert lines
    assert all("compute" in line and "releases" in line for line in lines)
    assert all(event.op != "release" for event in program.schedule())


def test_a_second_time_is_refused() -> None:
    program, plan = released()
    with pytest.raises(PassError, match="is released already"):
        ALL.apply(program, plan)


# -- on ranks --------------------------------------------------------------------------------------


WIDTH = 512  # a weight of 1 MiB travels by itself
WEIGHT = WIDTH * WIDTH * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def gradients_take_the_room_of_parameters(rank: int) -> None:
    cpu = torch.device("cpu")
    mesh = init_device_mesh("cpu", (2,))
    setting = Setting(mesh, cpu, ("Layer",), None, {"x": torch.ones(1, WIDTH)})
    torch.manual_seed(0)
    trained = graphshard_step(setting, Three())
    trained.step(setting.batch)
    watch = StepWatch()
    watch.add(trained.kept())
    with watch:
        trained.step(setting.batch, lambda: watch.end_of_backward(trained.module.parameters()))
    held = watch.transient
    # In the backward of the third layer: four weights or gradients of its own, and one more as
    # torch makes a gradient before it carries it on; and what the second needs for backward. No
    # gradients are on their way meanwhile: over Gloo each reduce is waited for at once.
    assert 4 + 4 <= held / WEIGHT <= 4 + 4 + 1.5, "not 8 + 4"


def poisoned_releases_do_no_harm(rank: int) -> None:
    data = Data(TINY, 2, 1, torch.device("cpu"))
    batch = data.batch(0, rank)
    losses = []
    with patch.object(torch_inductor, "compile_graph", lambda graph, *_: graph.forward):
        for least, check, backend in (
            (1 << 40, False, "eager"),
            (1, True, "eager"),
            (1, True, "inductor"),
            (1, False, "inductor"),
        ):
            with patch.object(pipeline, "ReleaseEarly", partial(ReleaseEarly, min_bytes=least)):
                sharded = graphshard.compile(
                    made(TINY, data.device),
                    graphshard.BlockPolicy(TINY.blocks),
                    example_kwargs=batch,
                    check=check,
                    backend=backend,
                )
                loss = sharded(**batch)
                loss.backward()
            losses.append([loss.detach(), *(p.grad.to_local() for p in sharded.parameters())])
    for found in losses[1:]:
        assert all(map(torch.equal, losses[0], found))
    code = sharded.lowered[1].code
    assert "graphshard_take(" in code


def stepped(rank: int, backend: str, patched: Any = None) -> tuple[list[Tensor], int, Any]:
    """This rank's gradients of a step, the most bytes it allocated, and the module."""
    torch.manual_seed(0)
    x = torch.ones(4, WIDTH) + rank
    with patched or nullcontext():
        sharded = graphshard.compile(
            Three(), graphshard.BlockPolicy({Layer}), example_inputs=(x,), backend=backend
        )
        sharded(x).backward()  # a region's first call is checked
        sharded.zero_grad()
        most = most_allocated(lambda: sharded(x).backward())
    return [param.grad.to_local() for param in sharded.parameters()], most, sharded


def regions_release_where_their_operators_do(rank: int) -> None:
    """Compiled, and where compiling fails: as little is held as in eager, and no bit differs."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("no compiler here")

    def predicted(sharded: Any) -> int:
        estimate = graphshard.simulate(sharded, hardware="cpu-gloo", optimizer="none")
        return estimate.peak_bytes - estimate.memory.valley

    slack = WEIGHT // 4
    never = patch.object(pipeline, "ReleaseEarly", partial(ReleaseEarly, min_bytes=1 << 40))
    expected, plain, without = stepped(rank, "inductor", never)
    found, most, sharded = stepped(rank, "inductor")
    assert all(map(torch.equal, expected, found))
    assert not sharded.program.regions.fell_back
    assert sharded.program.regions.distinct == without.program.regions.distinct
    assert most <= plain - 2 * WEIGHT + slack
    for measured, module in ((most, sharded), (plain, without)):
        assert abs(measured - predicted(module)) < slack
    expected, eager, _ = stepped(rank, "eager")
    assert most <= eager + slack
    failing = patch.object(torch_inductor, "compile_graph", fails)
    found, fallen, sharded = stepped(rank, "inductor", failing)
    assert sharded.program.regions.fell_back
    assert all(map(torch.equal, expected, found))
    assert fallen <= eager + slack


test_on_two_ranks = pytest.mark.slow(
    on_ranks(checks_of(globals()), 2, timeout=300, group_timeout=200)
)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_single_rank_keeps_its_parameters(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_inductor, "compile_graph", lambda graph, *_: graph.forward)
    torch.manual_seed(0)
    model = Three()
    sharded = graphshard.compile(model, graphshard.BlockPolicy({Layer}), backend=backend)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        sharded(x).backward()
    model(x).backward()
    model(x).backward()
    for ours, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)
