"""Whole-step CUDA graphs: which programs have them, and what is done around a replay.

The recorder here captures nothing: its replay runs the graph again on the tensors it was captured
with, and writes what comes out over what came out then, as kernels at fixed addresses do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import Block, TiedGPT, tokens_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from toy_programs import UNITS, blocks, make_toy_plan

import graphshard
from graphshard.errors import RuntimeStateError
from graphshard.passes import cuda_graph as graphable
from graphshard.pipeline import default_passes, run_passes
from graphshard.policy.units import Policy
from graphshard.runtime import cuda_graphs
from graphshard.runtime.accumulated import passes_for
from graphshard.runtime.cuda_graphs import Graphs
from graphshard.torch_private import compat as torch_cuda

GRAPHS = graphshard.BlockPolicy(Block, cuda_graph=True)


class Repeated:
    """Stands for what captures on a GPU."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, run: Any, args: list[Any]) -> tuple[Callable[[], None], Any]:
        self.captured += 1
        held = list(args)
        before = [[t.untyped_storage(), t.untyped_storage().nbytes()] for t in _tensors(held)]
        state = torch.get_rng_state()
        result = run(args)
        torch.set_rng_state(state)  # a capture draws nothing
        sizes = [(t, t.untyped_storage().nbytes()) for t in _tensors(result)]

        def replay() -> None:
            self.replayed += 1
            for storage, size in before:
                if not storage.nbytes():
                    storage.resize_(size)
            new = _tensors(run(list(held)))
            for (old, size), tensor in zip(sizes, new, strict=True):
                if old.untyped_storage().nbytes() != size:
                    old.untyped_storage().resize_(size)
                if old.data_ptr() != tensor.data_ptr():
                    old.copy_(tensor)

        return replay, result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Repeated:
    """Programs on the CPU are captured too."""
    made = Repeated()
    why_not = graphable.why_no_graph

    def on_cuda(program: graphshard.Program, plan: graphshard.ShardingPlan) -> str | None:
        device, program.device = program.device, "cuda"
        try:
            return why_not(program, plan)
        finally:
            program.device = device

    monkeypatch.setattr("graphshard.passes.cuda_graph.why_no_graph", on_cuda)
    monkeypatch.setattr(cuda_graphs, "Graphs", lambda program: Graphs(program, lambda: made))
    return made


def model(policy: graphshard.Policy = GRAPHS) -> graphshard.ShardedModule:
    torch.manual_seed(0)
    return graphshard.compile(TiedGPT(), policy)


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


@pytest.mark.parametrize("clear", [True, False])
def test_steps_are_those_without_graphs(recorder: Repeated, clear: bool) -> None:
    expected, found = trained(plain(), clear=clear), trained(model(), clear=clear)
    assert all(map(torch.equal, expected, found))
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


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def test_another_set_of_losses_is_an_error(recorder: Repeated) -> None:
    policy = graphshard.BlockPolicy(nn.Linear, cuda_graph=True)
    sharded = graphshard.compile(TwoOutputs(), policy)
    for _ in range(3):
        sharded(torch.ones(2, 3))[0].sum().backward()
    with pytest.raises(RuntimeStateError, match="the outputs that the first one reached"):
        sum(sharded(torch.ones(2, 3))).sum().backward()


def test_a_capture_that_fails_is_said_and_left(
    recorder: Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = trained(plain())
    monkeypatch.setattr(recorder, "capture", fails)
    sharded = model()
    assert all(map(torch.equal, expected, trained(sharded)))
    assert str(sharded.program.cuda_graphs) == (
        "none, since capture failed: operation not permitted when stream is capturing"
    )


class Stream:
    device = "cpu"


class Given:
    """`torch.cuda` as far as a `Recorder` needs it; the captures in `fail` are given up by CUDA,
    which torch leaves as it stands.
    """

    def __init__(self, fail: set[int]) -> None:
        self.fail = fail
        self.stream = Stream()
        self.captured: list[bool] = []
        self.capturing = self.pool_in_use = False

    CUDAGraph = SimpleNamespace

    def current_stream(self) -> Any:
        return self.stream

    def set_stream(self, stream: Any) -> None:
        self.stream = stream

    def graph_pool_handle(self) -> int:
        return 7

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        before, self.stream = self.stream, Stream()
        graph.replay = None
        self.capturing = self.pool_in_use = True
        try:
            yield
        finally:
            self.captured.append(len(self.captured) not in self.fail)
            if not self.captured[-1]:
                raise RuntimeError("the capture was invalidated")
            self.stream, self.capturing, self.pool_in_use = before, False, False

    def end_allocation(self, pool: int) -> None:
        assert pool == 7
        self.pool_in_use = False


@pytest.mark.parametrize("given_up", [True, False])
def test_a_capture_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    cuda = Given({0} if given_up else set())
    before = cuda.stream
    for name in ("CUDAGraph", "current_stream", "set_stream", "graph_pool_handle", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch_cuda, "end_allocation", cuda.end_allocation)

    def run(args: list[Any]) -> None:
        raise RuntimeError("not permitted\nwhen stream is capturing")

    with pytest.raises(RuntimeError) as raised:
        cuda_graphs.Recorder().capture(run, [])
    assert cuda_graphs._cause(raised.value) == "not permitted"
    assert cuda.stream is before
    assert not cuda.capturing
    assert not cuda.pool_in_use
    # Another, empty one takes torch's generator out of the state of a capture.
    assert cuda.captured == ([False, True] if given_up else [True])


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
