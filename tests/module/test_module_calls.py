"""What calling a sharded module and running backward mean, on a single rank."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from full_tensors import full_grads
from loops import same_step
from models import Block, ManyOutputs, Odd, TiedGPT, features_of, tokens_of
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError, PlanError, RuntimeStateError

LINEAR = graphshard.BlockPolicy({nn.Linear})
BLOCK = graphshard.BlockPolicy({Block})


def assert_same_grads(sharded: nn.Module, model: nn.Module) -> None:
    mine, theirs = full_grads(sharded), full_grads(model)
    assert mine.keys() == theirs.keys()
    for name, grad in mine.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.fixture
def pair() -> tuple[graphshard.ShardedModule, nn.Module]:
    """(sharded, the model itself)."""
    torch.manual_seed(0)
    model = ManyOutputs()
    return graphshard.compile(model, LINEAR, check=True), model


@pytest.mark.parametrize("used", ["loss", "pair0", "pair1", "all"])
def test_gradients_come_from_the_outputs_that_are_used(
    pair: tuple[graphshard.ShardedModule, nn.Module], used: str
) -> None:
    def objective(out: dict[str, Any]) -> Tensor:
        parts = {
            "loss": out["loss"],
            "pair0": out["pair"][0].sum(),
            "pair1": (out["pair"][1] * out["pair"][1].detach()).mean(),
        }
        return sum(parts.values()) if used == "all" else parts[used]

    sharded, model = pair
    for step in range(2):
        (x,) = features_of(0, step, 6)
        mine, theirs = sharded(x), model(x)
        assert mine.keys() == theirs.keys()
        assert isinstance(mine["pair"], tuple)
        assert torch.equal(mine["best"], theirs["best"])
        assert not mine["best"].requires_grad
        objective(mine).backward()
        objective(theirs).backward()
        assert_same_grads(sharded, model)


def test_unused_outputs_have_no_backward_of_their_own(
    pair: tuple[graphshard.ShardedModule, nn.Module],
) -> None:
    sharded, _ = pair
    results = sharded(*features_of(0, 0, 6))
    assert len(sharded.lowered) == 1  # which backward they need is known when it runs
    results["loss"].backward()
    _, lowered = sharded.lowered
    backward = lowered.code
    assert "right_all_gather" not in backward
    assert sharded.get_submodule("right").weight.grad is None


def test_gradients_that_are_not_contiguous(
    pair: tuple[graphshard.ShardedModule, nn.Module],
) -> None:
    sharded, model = pair
    (x,) = features_of(0, 0, 6)
    for module in pair:
        left, right = module(x)["pair"]
        (left.sum() + (right.t() * torch.arange(6.0)).sum()).backward()
    assert_same_grads(sharded, model)


def test_second_backward_is_refused() -> None:
    sharded = graphshard.compile(TiedGPT(1), BLOCK)
    loss = sharded(*tokens_of(0, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeStateError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused() -> None:
    sharded = graphshard.compile(ManyOutputs(), LINEAR)
    x = features_of(0, 0, 6)[0].requires_grad_()
    loss = sharded(x)["loss"]
    with pytest.raises(RuntimeStateError, match="second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_forward_without_backward_keeps_nothing() -> None:
    sharded = graphshard.compile(ManyOutputs(), LINEAR)
    gc.disable()  # what it holds must go at once, not when a cycle is found
    try:
        out = sharded(*features_of(0, 0, 6))
        call = weakref.ref(out["loss"].grad_fn.call)
        assert call() is not None
        del out
        assert call() is None
    finally:
        gc.enable()


def test_frozen_models_need_no_backward() -> None:
    model = Odd().requires_grad_(False)
    loss = graphshard.compile(model, BLOCK)(*features_of(0, 0, 16))
    assert not loss.requires_grad
    assert torch.equal(loss.isfinite(), torch.tensor(True))


def test_programs_are_kept_by_signature(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = TiedGPT(1)
    sharded = graphshard.compile(model, BLOCK, example_inputs=tokens_of(0, 0))
    assert sharded.plan.program is sharded.program
    sharded(*tokens_of(0, 0))
    assert len(sharded.programs) == 1
    with caplog.at_level(logging.INFO, "graphshard"):
        sharded.eval()
        sharded(*tokens_of(0, 0))
        sharded.train()
        sharded(*tokens_of(0, 1))
    assert len(sharded.programs) == 2
    assert [r.getMessage() for r in caplog.records if r.name == "graphshard"] == [
        "graphshard captured program 2, since the call differs from the last one: "
        "mode: train -> eval"
    ]
    assert [r.levelname for r in caplog.records if r.name == "graphshard"] == ["INFO"]
    sharded.get_submodule("blocks.0.drop").eval()
    sharded(*tokens_of(0, 0))
    assert len(sharded.programs) == 3
    assert model.training
    assert model.blocks[0].drop.training


def test_an_evaluation_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its first call may have a larger batch, and no targets; the next of another size is known."""
    sharded = graphshard.compile(nn.Sequential(nn.Linear(4, 4)), LINEAR)
    with caplog.at_level(logging.INFO, "graphshard"):
        sharded(torch.ones(2, 4)).sum().backward()
        sharded.eval()
        with torch.no_grad():
            sharded(torch.ones(8, 4))
            sharded(torch.ones(3, 4))
    assert [r.levelname for r in caplog.records if r.name == "graphshard"] == ["INFO"]


@pytest.mark.slow
def test_many_signatures_are_warned_of() -> None:
    sharded = graphshard.compile(TiedGPT(1), BLOCK, dynamic=None)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    for length in range(1, 9):
        sharded(tokens[:, :length], tokens[:, :length])
    what = r"what keeps changing: args\[0\], args\[1\]; name sizes that vary"
    with pytest.warns(UserWarning, match=what):
        sharded(tokens[:, :9], tokens[:, :9])


def test_example_inputs_may_be_meta_tensors() -> None:
    examples = tuple(t.to("meta") for t in tokens_of(0, 0))
    sharded = graphshard.compile(TiedGPT(1), BLOCK, example_inputs=examples)
    sharded(*tokens_of(0, 0)).backward()
    assert len(sharded.programs) == 1


def test_autocast_is_part_of_the_program() -> None:
    torch.manual_seed(0)
    model = ManyOutputs()
    sharded = graphshard.compile(model, LINEAR)
    (x,) = features_of(0, 0, 6)
    for module in (sharded, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
            assert out["pair"][0].dtype == torch.bfloat16
            out["loss"].backward()
    assert_same_grads(sharded, model)
    assert sharded(x)["pair"][0].dtype == torch.float32


def test_pickles_are_refused() -> None:
    sharded = graphshard.compile(TiedGPT(1), BLOCK)
    with pytest.raises(RuntimeStateError, match="cannot be pickled"):
        pickle.dumps(sharded)


def test_names_and_repr_are_the_models() -> None:
    model = TiedGPT(1)
    sharded = graphshard.compile(model, BLOCK)
    assert repr(sharded) == repr(model)
    for method in ("named_parameters", "named_buffers", "named_modules"):
        names = [name for name, _ in getattr(model, method)(remove_duplicate=False)]
        assert [name for name, _ in getattr(sharded, method)(remove_duplicate=False)] == names
    assert list(sharded.state_dict()) == list(model.state_dict())


# -- where it could quietly differ from the model ---------------------------------------------


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)


def test_asking_for_input_gradients_leaves_parameters_alone():
    model, x = model_and_input()
    sharded = graphshard.compile(model, LINEAR)
    x.requires_grad_()
    (mine,) = torch.autograd.grad(sharded(x).sum(), x)
    (theirs,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(mine, theirs)
    sharded(x).sum().backward(inputs=[x])
    assert torch.equal(x.grad, theirs)
    assert all(p.grad is None for p in sharded.parameters())
    sharded(x).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


@pytest.mark.parametrize("carried_over", [False, True])
def test_hooks_of_parameters_see_and_change_gradients(carried_over):
    model, x = model_and_input()
    order = []

    def hook(module):
        weight = module.get_submodule("0").weight
        weight.register_hook(lambda g: order.append("before") or g * 2)
        weight.register_post_accumulate_grad_hook(lambda p: order.append("after"))

    if carried_over:
        hook(model)
        model[2].weight.register_hook(lambda g: order.append("frozen"))
        model[2].weight.requires_grad_(False)
    sharded = graphshard.compile(model, LINEAR)
    assert sharded.get_submodule("2").weight.requires_grad != carried_over
    for each in (model, sharded):
        if not carried_over:
            hook(each)
        each(x).sum().backward()
        assert order == ["before", "after"]
        order.clear()
    assert torch.equal(sharded.get_submodule("0").weight.grad, model[0].weight.grad)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_that_would_never_run_are_refused(register):
    model, x = model_and_input()
    sharded = graphshard.compile(model, LINEAR)
    with pytest.raises(RuntimeStateError, match=r"0 \(Linear\) is a part of a sharded"):
        getattr(sharded.get_submodule("0"), register)(lambda *_: None)
    seen = []
    sharded.register_forward_hook(lambda *_: seen.append("whole"))
    sharded(x)
    assert seen == ["whole"]


def test_lists_of_modules_are_looked_into_as_the_models_own():
    model = nn.Sequential()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])
    model.heads = nn.ModuleDict({"a": nn.Linear(3, 1)})
    sharded = graphshard.compile(model, LINEAR)
    assert len(sharded.layers) == 2
    assert sharded.layers[-1].weight.shape == (3, 2)
    assert [part.weight.shape[0] for part in sharded.layers] == [2, 3]
    assert list(sharded.heads) == ["a"]
    assert sharded.heads["a"] is sharded.get_submodule("heads.a")


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, a, b):
        a.add_(1)
        return self.fc(b)


def test_an_input_changed_in_place_may_not_be_shared():
    sharded = graphshard.compile(Adds(), LINEAR)
    u, v = torch.zeros(1, 2), torch.zeros(1, 2)
    sharded(u, v)
    assert torch.equal(u, torch.ones(1, 2))
    with pytest.raises(RuntimeStateError, match=r"args\[0\] and args\[1\] share memory"):
        sharded(u, u)


class Overlapping(nn.Module):
    def __init__(self, change: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])
        self.change = change

    def forward(self, x):
        if self.change:
            self.whole.add_(1)
        return self.fc(x) + self.part.sum()


def test_a_buffer_that_is_changed_may_not_be_shared():
    x = torch.zeros(1, 4)
    still = Overlapping(change=False)
    assert torch.equal(graphshard.compile(still, LINEAR)(x), still(x))
    with pytest.raises(CaptureError, match="'whole', which shares its memory with buffer 'part'"):
        graphshard.compile(Overlapping(change=True), LINEAR)(x)


def test_what_cannot_be_copied_does_not_keep_the_weights():
    model, x = model_and_input()
    model[0].lock = threading.Lock()
    expected = model(x).detach()
    weight = weakref.ref(model[0].weight)
    sharded = graphshard.compile(model, LINEAR)
    del model
    gc.collect()
    assert weight() is None
    assert torch.equal(sharded(x), expected)


def test_another_attention_backend_is_another_program():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return nn.functional.scaled_dot_product_attention(h, h, h)

    sharded = graphshard.compile(Attends(), LINEAR)
    x = torch.randn(1, 1, 3, 4)
    sharded(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        sharded(x)
    assert len(sharded.programs) == 2
    kernels = [any("flash" in n.name for n in p.nodes()) for p in sharded.programs]
    assert kernels == [True, False]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_sparse_gradients_are_refused(strategy):
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    sharded = graphshard.compile(model, graphshard.SizePolicy(strategy=strategy))
    with pytest.raises(PlanError, match=r"gradient of parameter '0\.weight' is sparse"):
        sharded(torch.tensor([1, 2]))


class Grouped(nn.Module):
    """Experts whose rows lie one after the other, as transformers' MoE models run them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 16))
        self.down = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.grouped_mm(x, self.up, offs=ends)
        return nn.functional.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_in_every_dtype(dtype):
    """torch's meta kernel knows bfloat16 alone."""
    torch.manual_seed(0)
    model = Grouped().to(dtype)
    args = torch.randn(6, 8, dtype=dtype), torch.tensor([2, 3, 6], dtype=torch.int32)
    ours = graphshard.compile(model, graphshard.BlockPolicy({Grouped}), check=True)
    same_step(model, ours, *args, objective=lambda out: out.square().sum())
