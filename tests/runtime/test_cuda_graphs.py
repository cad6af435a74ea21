"""Whole-step CUDA graphs: which programs have them, and what is done around a replay."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, TiedGPT, TwoOutputs, tokens_of
from repeated_graphs import Repeated, graphs_on_cpu
from torch import Tensor, nn
from toy_programs import UNITS, blocks, make_toy_plan

import graphshard
from graphshard.errors import RuntimeStateError
from graphshard.pipeline import default_passes, passes_for, run_passes
from graphshard.policy.units import Policy
from graphshard.runtime import cuda_graphs

GRAPHS = graphshard.BlockPolicy(Block, cuda_graph=True)


@pytest.fixture
def recorder() -> Iterator[Repeated]:
    """Programs on the CPU are captured too."""
    made = Repeated()
    with graphs_on_cpu(made):
        yield made


def model(policy: graphshard.Policy = GRAPHS) -> graphshard.ShardedModule:
    torch.manual_seed(0)
    return graphshard.compile(TiedGPT(layers=1), policy)


def trained(sharded: nn.Module, steps: int = 6, *, clear: bool = True) -> list[Tensor]:
    """Losses and gradients of all steps, as they are at the end, and the parameters."""
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = sharded(*tokens_of(0, step))
        loss.backward()
        found += [loss.detach(), *(p.grad for p in sharded.parameters() if p.grad is not None)]
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in sharded.parameters())]


def plain() -> graphshard.ShardedModule:
    return model(graphshard.BlockPolicy(Block))


@cache
def expected(steps: int = 6, *, clear: bool = True) -> list[Tensor]:
    """What `trained` finds without graphs."""
    return trained(plain(), steps, clear=clear)


@pytest.mark.parametrize("clear", [True, False])
def test_steps_are_those_without_graphs(recorder: Repeated, clear: bool) -> None:
    assert all(map(torch.equal, expected(clear=clear), trained(model(), clear=clear)))
    assert (recorder.captured, recorder.replayed) == (2, 8)


class Normed(nn.Module):
    """Its buffers change in forward, and its input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).square().sum() + x.sum()


def test_buffers_and_gradients_of_inputs(recorder: Repeated) -> None:
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy(nn.Linear, cuda_graph=graphs)
        sharded = graphshard.compile(Normed(), policy)
        inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(5)]
        for x in inputs:
            sharded(x).backward()
        results.append([*(x.grad for x in inputs), *sharded.buffers()])
    assert all(map(torch.equal, *results))
    assert recorder.captured == 2


def test_a_forward_before_the_last_ones_backward_runs_without(recorder: Repeated) -> None:
    totals = []
    for sharded in (plain(), model()):
        for _ in range(4):
            sharded.zero_grad()
            losses = []
            for part in range(2):
                torch.manual_seed(part)
                losses.append(sharded(*tokens_of(0, part)))
            for loss in losses:
                loss.backward()
        totals.append([p.grad for p in sharded.parameters()])
    assert all(map(torch.equal, *totals))
    assert recorder.captured == 2
    assert recorder.replayed == 2 * 3  # of four steps the first warmed up, with both its calls


def test_each_shape_and_mode_is_captured_when_met(recorder: Repeated) -> None:
    sharded = model()
    tokens, targets = tokens_of(0, 0)
    for length in (5, 5, 5, 3, 3, 3, 5):
        sharded(tokens[:, :length], targets[:, :length]).backward()
    assert recorder.captured == 4
    sharded.eval()
    with torch.no_grad():
        outputs = [sharded(*tokens_of(0, step)) for step in (0, 0, 0, 1)]
    assert recorder.captured == 5
    assert torch.equal(outputs[0], outputs[2]), "a replay wrote over what was returned before"
    assert not torch.equal(outputs[2], outputs[3])


def test_a_replaced_parameter_is_captured_anew(recorder: Repeated) -> None:
    sharded = model()
    for _ in range(4):
        sharded(*tokens_of(0, 0)).backward()
    sharded.head.weight = nn.Parameter(torch.zeros_like(sharded.head.weight))
    sharded.embed.weight = sharded.head.weight
    loss = sharded(*tokens_of(0, 0))
    assert recorder.captured == 3
    torch.testing.assert_close(loss, torch.tensor(19.0).log())


def test_forwards_whose_backward_never_comes(recorder: Repeated) -> None:
    sharded, eager = model(), plain()
    for step in range(6):
        loss = None  # or else it would be in the way of a replay
        torch.manual_seed(step)
        loss = sharded(*tokens_of(0, step))
    assert loss is not None
    loss.backward()
    torch.manual_seed(5)
    eager(*tokens_of(0, 5)).backward()
    assert recorder.captured == 2
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (sharded, eager))))


def test_programs_share_memory_but_where_a_backward_is_pending(
    recorder: Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Repeated] = []
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda device: made.append(recorder) or recorder)
    tokens, targets = tokens_of(0, 0)
    short = tokens[:, :3], targets[:, :3]
    grads = []
    for sharded in (plain(), model()):
        for _ in range(4):
            sharded(tokens, targets).backward()
            sharded(*short).backward()
        before = recorder.replayed
        sharded.zero_grad()
        torch.manual_seed(0)
        loss = sharded(tokens, targets)
        other = sharded(*short)  # would write over what the first one saved
        loss.backward()
        other.backward()
        grads.append([p.grad for p in sharded.parameters()])
    assert all(map(torch.equal, *grads))
    assert recorder.replayed == before + 2
    assert (len(made), recorder.captured) == (1, 4)
    sharded.release_graphs()
    sharded(tokens, targets)
    assert len(made) == 2  # the pool of the first ones is gone


def test_another_set_of_losses_is_an_error(recorder: Repeated) -> None:
    policy = graphshard.BlockPolicy(nn.Linear, cuda_graph=True)
    sharded = graphshard.compile(TwoOutputs(), policy)
    for _ in range(3):
        sharded(torch.ones(2, 4))[0].sum().backward()
    with pytest.raises(RuntimeStateError, match="the outputs that the first one reached"):
        sum(sharded(torch.ones(2, 4))).sum().backward()


def test_a_capture_that_fails_is_said_and_left(
    recorder: Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "capture", fails)
    sharded = model()
    assert all(map(torch.equal, expected(), trained(sharded)))
    assert str(sharded.program.cuda_graphs) == (
        "none, since capture failed: operation not permitted when stream is capturing"
    )


# -- releasing -----------------------------------------------------------------------------------


def test_released_graphs_are_captured_again(recorder: Repeated) -> None:
    sharded = model()
    found = trained(sharded, steps=4)
    assert recorder.alive == 2
    sharded.release_graphs()
    assert recorder.alive == 0
    for param, start in zip(sharded.parameters(), plain().parameters(), strict=True):
        param.data.copy_(start)
    again = trained(sharded, steps=4)
    assert all(map(torch.equal, 2 * expected(steps=4), found + again))
    assert (recorder.captured, recorder.alive) == (4, 2)


def test_a_backward_whose_graphs_are_gone_is_an_error(recorder: Repeated) -> None:
    sharded = model()
    for _ in range(4):
        loss = sharded(*tokens_of(0, 0))
        loss.backward()
    loss = sharded(*tokens_of(0, 0))
    sharded.release_graphs()
    with pytest.raises(RuntimeStateError, match="released between a forward and its backward"):
        loss.backward()
    sharded(*tokens_of(0, 0)).backward()
    assert recorder.alive == 2


class Ended(Repeated):
    """Notes whether communicators were there when its graphs were released."""

    def __init__(self) -> None:
        super().__init__()
        self.there: list[bool] = []

    def reset(self) -> None:
        super().reset()
        self.there.append(dist.is_initialized())


@pytest.fixture
def two_ranks(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ended]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = Ended()
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda device: made)
    monkeypatch.setattr(cuda_graphs, "_why_not_here", lambda group: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_graphs_are_released_before_their_communicators(two_ranks: Ended, end: str) -> None:
    sharded, alone = model(), two_ranks
    trained(sharded, steps=3)
    other = dist.new_group([0, 1])
    assert other is not None
    dist.destroy_process_group(other)
    assert (alone.alive, alone.there) == (2, [])  # of another group
    if end == "destroy":
        dist.destroy_process_group()
    else:
        dist.group.WORLD.abort()
    assert (alone.alive, alone.there) == (0, [True, True])


def test_graphs_are_released_at_exit(recorder: Repeated, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = [print]
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", lambda hook: hook in hooks and hooks.remove(hook))
    sharded = model()
    trained(sharded, steps=3)
    assert len(hooks) == 2  # called from the last one on
    hooks[-1]()
    assert recorder.alive == 0
    del sharded


# -- what plan and dump say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "device", "reason"),
    [
        ({}, "cpu", "none, since it runs on cpu"),
        ({"offload": "activations"}, "cuda", "none, since what is offloaded is copied to and from"),
        ({}, "cuda", "one for forward and one for backward"),
    ],
)
def test_plan_and_dump_say_whether(fields: Any, device: str, reason: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("captured for real there")
    plan = graphshard.plan(
        TiedGPT(),
        graphshard.BlockPolicy(Block, cuda_graph=True, **fields),
        world_size=2,
        example_inputs=tokens_of(0, 0),
        device=device,
    )
    assert f"cuda graph: {reason}" in str(plan)
    assert f"note: cuda graph: {reason}" in str(plan.program)
    assert "cuda_graph=True" in str(plan)


def test_what_is_dynamic_or_checked_has_none(recorder: Repeated) -> None:
    dynamic = graphshard.compile(
        TiedGPT(), GRAPHS, dynamic={"tokens": {1: "t"}, "targets": {1: "t"}}
    )
    dynamic(*tokens_of(0, 0)).backward()
    assert "its sizes are symbolic" in str(dynamic.program.cuda_graphs)
    checked = graphshard.compile(TiedGPT(), GRAPHS, check=True)
    checked(*tokens_of(0, 0)).backward()
    assert "check=True" in str(checked.program.cuda_graphs)
    assert recorder.captured == 0


def test_what_keeps_gradients_has_none() -> None:
    program = blocks()
    program.device = "cuda"
    policy = Policy(cuda_graph=True)
    plan = make_toy_plan(program, UNITS[blocks], policy)
    run_passes(program, plan, passes_for(default_passes(policy), ("gradient", (), ())))
    assert str(program.cuda_graphs).startswith("none, since gradients are kept from one call")
