"""Where a sharded module could quietly differ from the model: partial backwards, hooks, aliases."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from loops import same_step
from torch import nn

import graphshard
from graphshard.errors import CaptureError, PlanError, RuntimeStateError

LINEAR = graphshard.BlockPolicy({nn.Linear})


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
