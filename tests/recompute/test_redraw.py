"""Random numbers of recomputed regions: drawn again from saved states, to the bit as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.errors import VerifyError
from graphshard.passes.form_regions import FormRegions
from graphshard.passes.recompute import KEPT
from graphshard.pipeline import run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import begins_replay
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, REPLAYS, Program
from graphshard.program.regions import REGION
from graphshard.program.storages import SAVED, storages_of
from graphshard.runtime.lower import bind_random_state, put_back_on_error
from graphshard.verify.rules import verify

aten = torch.ops.aten
X = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
STATE = torch.get_rng_state().numel()
apart = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """Draws of every sort: dropouts with and without their output, noise, a small mask of rows."""

    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.drop = nn.Dropout(0.2)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.softmax(self.up(self.norm(x)), -1))
        h = h.sin() * (1 + 0.1 * torch.rand_like(h)) + torch.randn_like(h).sin() * h
        h = self.around(self.inner, h) if self.around else self.inner(h)
        h = self.drop(self.down(h.cos()))
        return x + h * torch.bernoulli(torch.full((x.shape[0], 1), 0.9))

    def inner(self, h: Tensor) -> Tensor:
        return self.drop(h.tanh()).exp()


class Stack(nn.Module):
    def __init__(self, around: Callable[..., Any] | None = None, inner: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([Block(inner) for _ in range(2)])
        self.around = around or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.around(block, x)
        return torch.dropout(x, 0.1, True).square().mean()


def numbers(model: nn.Module, *calls: Tensor, seed: int = 5) -> list[Tensor]:
    """Losses, gradients and a number drawn afterwards; all forwards run before any backward."""
    model.zero_grad()
    torch.manual_seed(seed)
    losses = [model(x) for x in calls]
    for loss in reversed(losses):
        loss.backward()
    grads = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*(loss.detach() for loss in losses), *grads, torch.rand(3)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def compiled(model: nn.Module, **fields: Any) -> Any:
    options = {key: fields.pop(key) for key in ("check", "backend", "dynamic") if key in fields}
    policy = graphshard.BlockPolicy({Block}, **fields)
    return graphshard.compile(model, policy, example_inputs=(X,), **options)


def program_of(model: nn.Module, **fields: Any) -> Program:
    options = {key: fields.pop(key) for key in ("device",) if key in fields}
    policy = graphshard.BlockPolicy({Block}, **fields)
    options = {"device": "cpu", **options}
    made = graphshard.plan(model, policy, world_size=2, example_inputs=(X,), **options).program
    assert made is not None
    return made


def saved_of(program: Program) -> list[fx.Node]:
    """The nodes of blocks whose results are saved."""
    storages = storages_of(program).all
    return [s.node for s in storages if s.kind == SAVED and s.unit and s.node.meta["unit"]]


def states(program: Program) -> list[fx.Node]:
    return [node for node in program.nodes() if node.target is ops.save_random_state]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def budget(model: nn.Module) -> dict[str, Any]:
    """Less memory than units need: some choice that draws again fits."""
    units = max(storages_of(program_of(model, recompute="units")).live())
    return {"recompute": "budget", "memory_budget": int(0.9 * units)}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (Stack, {"recompute": "units"}),
        (Stack, {"recompute": "selective"}),
        (Stack, {"recompute": {nn.Dropout, nn.LayerNorm}}),
        (Stack, "budget"),
        (partial(Stack, apart), {}),
        slow(partial(Stack, apart, apart), {"recompute": "units"}),
        slow(partial(Stack, None, apart), {"recompute": "units"}),
        slow(partial(Stack, partial(checkpoint, use_reentrant=True)), {}),
    ],
    ids=["units", "selective", "classes", "budget", "checkpoint", "nested", "inner", "reentrant"],
)
def test_every_way_of_recompute_gives_the_bits_of_eager(
    model: Callable[[], nn.Module], fields: Any
) -> None:
    plain = model()
    sharded = compiled(plain, **(budget(plain) if fields == "budget" else fields), check=True)
    assert any(map(begins_replay, sharded.program.nodes()))
    expected = numbers(copy.deepcopy(plain), X)
    assert same(numbers(sharded, X), expected)
    assert same(numbers(compiled(plain), X), expected)
    assert same(numbers(sharded, X, X + 1), numbers(copy.deepcopy(plain), X, X + 1))


def test_states_are_saved_and_no_mask_is() -> None:
    program = program_of(Stack(), recompute="units")
    kept = saved_of(program)
    assert not any(map(ops.is_random, kept))
    assert {n.target for n in kept if ops.op_of(n)} == {ops.save_random_state}
    # Backward needs the last two draws first, and alone; the others go on from one state.
    assert [n.meta["unit"] for n in states(program)] == ["blocks.0"] * 3 + ["blocks.1"] * 3
    bytes_of = storages_of(program).saved_by(lambda storage: storage.unit)
    assert bytes_of["blocks.0"] <= 3 * STATE + X.numel() * 4 + 4 * X.shape[0]


def test_a_mask_that_is_needed_alone_needs_no_operand() -> None:
    program = program_of(Stack(), recompute="units")
    again = [node for node in program.nodes(BACKWARD) if RECOMPUTED in node.meta]
    assert [n.target for n in again].count(aten.addmm.default) == 2  # not `down`, only `up`
    assert [n.target for n in again].count(aten.zeros.default) == 2
    draws = [node for node in again if REPLAYS in node.meta]
    assert len(draws) == 2 * 5 + 2
    text = str(program)
    assert f"save_random_state  blocks.0  {STATE:,} bytes, of the cpu generator" in text
    assert "set_random_state   blocks.1  of the cpu generator, to draw again" in text
    assert "set_random_state   blocks.1  of the cpu generator, as it was before" in text


def test_a_region_that_draws_little_keeps_it() -> None:
    class Rows(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sin(self.up(x)) * torch.bernoulli(torch.full((96, 1), 0.5))

    model = Stack()
    model.blocks = nn.ModuleList([Rows(), Rows()])
    program = program_of(model, recompute="units")
    assert states(program) == []
    assert same(numbers(compiled(model, recompute="units"), X), numbers(copy.deepcopy(model), X))


def test_with_a_cuda_graph_masks_are_kept_and_it_says_why() -> None:
    program = program_of(Stack(), recompute="units", cuda_graph=True)
    assert KEPT in program.notes
    assert states(program) == []
    assert any(map(ops.is_random, saved_of(program)))
    assert KEPT not in program_of(Stack(), cuda_graph=True).notes


def test_a_state_on_cuda_is_a_seed_and_an_offset() -> None:
    program = program_of(Stack(), recompute="units", device="cuda")
    assert {tuple(node.meta["val"].shape) for node in states(program)} == {(16,)}
    assert {node.kwargs["device"] for node in states(program)} == {"cuda"}


@torch.library.custom_op("test_redraw::jitter", mutates_args=())
def jitter(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


jitter.register_fake(torch.empty_like)
jitter.register_autograd(lambda ctx, grad: grad)


class Jittery(Block):
    """Draws by `jitter`, and with `drops` by dropouts before and after it."""

    def __init__(self, drops: bool = True) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2 if drops else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.softmax(self.up(x), -1))
        return x + self.drop(self.down(jitter(h).detach() * h.sin())).sin()


class JitteryStack(Stack):
    """Returns the loss and what it is of; mostly backward starts from the loss alone."""

    def __init__(self, drops: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Jittery(drops), Jittery(drops)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(), x


def of_loss(model: nn.Module, both: bool) -> list[Tensor]:
    """The gradients of the loss, and a number drawn afterwards."""
    model.zero_grad()
    torch.manual_seed(5)
    loss, x = model(X)
    (loss + x.mean() if both else loss).backward()
    grads = [p.grad.clone() for p in model.blocks.parameters() if p.grad is not None]
    return [*grads, torch.rand(3)]


@pytest.mark.parametrize("drops", [True, False], ids=["among dropouts", "alone"])
@pytest.mark.parametrize("recompute", ["selective", "units", "units, in a CUDA graph"])
def test_an_operator_that_draws_without_saying_so_draws_again(recompute: str, drops: bool) -> None:
    model = JitteryStack(drops)
    how, _, in_graph = recompute.partition(", ")
    sharded = compiled(model, recompute=how, cuda_graph=bool(in_graph))
    again = [n for n in sharded.program.nodes(BACKWARD) if n.meta.get(REPLAYS, "")[:6] == "jitter"]
    assert bool(again) == bool(states(sharded.program)) == (not in_graph)
    for both in (True, False):
        assert same(of_loss(sharded, both), of_loss(copy.deepcopy(model), both))


def test_an_operator_that_may_draw_is_refused_without_the_state_it_had() -> None:
    def planned() -> tuple[Program, ShardingPlan]:
        policy = graphshard.BlockPolicy({Block}, recompute="units")
        model = JitteryStack(drops=False)
        plan = graphshard.plan(model, policy, world_size=2, example_inputs=(X,))
        assert plan.program is not None
        return plan.program, plan

    stripped, plan = planned()
    for node in [n for n in stripped.nodes(BACKWARD) if n.target is ops.set_random_state][::-1]:
        stripped.graph.erase_node(node)
    with pytest.raises(VerifyError, match="it may draw, and is repeated without a saved"):
        verify(stripped, plan, after="stripped")
    late, plan = planned()
    draw = next(n for n in late.nodes(FORWARD) if n.name.startswith("jitter"))
    draw.append(states(late)[0])
    with pytest.raises(VerifyError, match="in forward other draws stand between"):
        verify(late, plan, after="late")


def test_an_operator_that_may_draw_is_in_no_compiled_region() -> None:
    policy = graphshard.BlockPolicy({Block}, recompute="units")
    plan = graphshard.plan(JitteryStack(), policy, world_size=2, example_inputs=(X,))
    assert plan.program is not None
    run_passes(plan.program, plan, (FormRegions(),))
    draws = [n for n in plan.program.nodes() if n.name.startswith("jitter")]
    assert len(draws) == 4
    assert plan.program.regions is not None
    assert not [node for node in draws if REGION in node.meta]


@pytest.mark.parametrize("computed", [True, False])
def test_a_mask_is_drawn_from_zeros_only_for_what_an_operator_allocated(computed: bool) -> None:
    """Where memory begins that is given to a program, and so how CUDA draws, may change by call."""

    class Position(Block):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(96, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.position.sin() if computed else self.position)

    model = Stack()
    model.blocks = nn.ModuleList([Position(), Position()])
    program = program_of(model, recompute="units")
    again = [n for n in program.nodes(BACKWARD) if REPLAYS in n.meta]
    assert len(again) == 2
    zeros = [node.args[0].target is aten.zeros.default for node in again]
    assert zeros == [computed, computed]


class Fails(TorchDispatchMode):
    """Raises at a draw, as where memory runs out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.rand_like.default:
            raise RuntimeError("no memory left")
        return func(*args, **(kwargs or {}))


def test_a_backward_that_fails_leaves_the_generator_as_it_was() -> None:
    sharded = compiled(Stack(), recompute="units")
    torch.manual_seed(5)
    loss = sharded(X)
    before = torch.get_rng_state()
    with Fails(), pytest.raises(RuntimeError, match="no memory left"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


class Two(nn.Module):
    """Two outputs, each through a block; backward may reach one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).square().mean(), self.right(x).square().mean()


@pytest.mark.parametrize("output", [0, 1])
def test_an_output_without_a_gradient_draws_nothing_again(output: int) -> None:
    model = Two()
    sharded = compiled(model, recompute="units")
    found, expected = [], []
    for one, results in ((sharded, found), (copy.deepcopy(model), expected)):
        torch.manual_seed(5)
        one(X)[output].backward()
        results += [torch.zeros(1) if p.grad is None else p.grad for p in one.parameters()]
        results.append(torch.rand(3))
    assert same(found, expected)
    (step,) = sharded._graphshard.programs.steps.values()
    (other,) = (p for missing, (_, p) in step._backwards.items() if missing)
    units = {node.meta["unit"] for node in filter(begins_replay, other.nodes())}
    assert units == {["left", "right"][output]}


@pytest.mark.slow
def test_compiled_regions_draw_again_what_they_drew() -> None:
    model = Stack(None, apart)
    sharded = compiled(model, recompute="units", backend="inductor")
    plain = compiled(model, backend="inductor")
    assert any(map(begins_replay, sharded.program.nodes()))
    assert sharded.program.regions is not None
    found, expected = numbers(sharded, X), numbers(plain, X)
    assert torch.equal(found[-1], expected[-1])
    for a, b in zip(found, expected, strict=True):  # other fusions round otherwise
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_one_program_draws_again_for_every_size() -> None:
    model = Stack()
    sharded = compiled(model, recompute="units", dynamic={"x": {0: "batch"}}, check=True)
    assert states(sharded.program)
    for rows in (96, 40, 131):
        x = torch.randn(rows, 64)
        assert same(numbers(sharded, x), numbers(copy.deepcopy(model), x))
    assert len(sharded.programs) == 1


def test_states_of_cuda_are_those_of_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the generator of a GPU."""
    now = {"cuda:1": torch.zeros(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: now[str(device)].clone())
    put = lambda state, device: now.__setitem__(str(device), state.clone())  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    graph, device = fx.Graph(), torch.device("cuda", 1)
    save = graph.call_function(ops.save_random_state, (), {"device": "cuda"})
    begin = graph.call_function(ops.set_random_state, (save,), {"device": "cuda"})
    for node in (save, begin):
        bind_random_state(node, device)
    state = save.target()
    now["cuda:1"] += 4
    present = begin.target(state)
    assert int(now["cuda:1"].sum()) == 0
    assert int(present.sum()) == 64

    def draw_and_fail() -> None:
        now["cuda:1"] += 1
        raise MemoryError

    with pytest.raises(MemoryError), put_back_on_error(frozenset({"cuda"}), device):
        draw_and_fail()
    assert int(now["cuda:1"].sum()) == 0
