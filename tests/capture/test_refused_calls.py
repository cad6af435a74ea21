"""Calls that a trace would record as something else are refused with their line and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from capture_models import Net, X, linear
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError, PlanError, RuntimeStateError


@pytest.fixture
def group() -> Any:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def all_reduce(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x).detach()
    dist.all_reduce(y)  # the line at fault
    return m.fc(y)


def objects(m: Any, x: Tensor) -> Tensor:
    dist.all_gather_object([None, None], 3)  # the line at fault
    return m.fc(x)


def differentiable(m: Any, x: Tensor) -> Tensor:
    return dist_nn.all_reduce(m.fc(x))  # the line at fault


def functional(m: Any, x: Tensor) -> Tensor:
    return functional_collectives.all_reduce(m.fc(x), "sum", dist.group.WORLD)  # the line at fault


class ReducesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad)  # the line at fault
        return grad


def in_backward(m: Any, x: Tensor) -> Tensor:
    return ReducesGradients.apply(m.fc(x))


@pytest.mark.parametrize(
    ("forward", "call"),
    [
        (all_reduce, r"torch\.distributed\.all_reduce"),
        (objects, r"torch\.distributed\.all_gather_object"),
        (differentiable, r"torch\.distributed\.all_reduce"),
        (functional, r"_c10d_functional\.all_reduce\.default"),
        (in_backward, r"c10d\.allreduce_\.default"),
    ],
)
def test_collectives_of_a_model_are_refused(group: Any, forward: Any, call: str) -> None:
    said = rf"issues a collective of its own \({call}\), which(.|\n)*the line at fault"
    with pytest.raises(CaptureError, match=said):
        capture(Net(forward, fc=linear()), (X,))


def test_a_rank_may_know_its_number(group: Any) -> None:
    capture(
        Net(lambda m, x: m.fc(x) * (dist.get_rank() + dist.get_world_size()), fc=linear()), (X,)
    )


def test_no_group_is_no_collective() -> None:
    model = Net(lambda m, x: m.fc(x) * dist.get_world_size(dist.group.WORLD), fc=linear())
    with pytest.raises(CaptureError, match="process group has not been initialized"):
        capture(model, (X,))


def test_modules_that_communicate_are_refused_on_several_ranks() -> None:
    policy = graphshard.SizePolicy(10)
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(PlanError, match=r"^1 \(SyncBatchNorm\) issues collectives .*GroupNorm"):
        graphshard.plan(model, policy, world_size=2)
    model[1].eval()
    graphshard.plan(model, policy, world_size=2)


def test_a_sync_batch_norm_without_a_group_is_refused(group: Any) -> None:
    model = Net(lambda m, x: m.norm(m.fc(x)), fc=linear(), norm=nn.SyncBatchNorm(4))
    with pytest.raises(CaptureError, match="SyncBatchNorm issues collectives"):
        capture(model, (X,))


GENERATOR = torch.Generator()

DRAWS: dict[str, Any] = {
    "rand": lambda x, g: torch.rand(4, generator=g),
    "normal_": lambda x, g: torch.empty(4).normal_(generator=g),
    "randperm": lambda x, g: torch.randperm(4, generator=g),
}


@pytest.mark.parametrize(
    ("name", "writes"), [*((name, False) for name in DRAWS), ("rand", True), ("normal_", True)]
)
def test_numbers_of_a_generator_are_refused(name: str, writes: bool) -> None:
    def forward(m: Any, x: Tensor, generator: Any) -> Tensor:
        y = m.fc(x)
        if writes:  # in another kind of trace
            y = y.clone().add_(1)
        return y + DRAWS[name](x, generator)

    model = Net(forward, fc=linear())
    with pytest.raises(CaptureError, match=r"from a torch\.Generator \(aten\.(.|\n)*in <lambda>"):
        capture(model, (X, GENERATOR))
    capture(model, (X, None))


def test_a_generator_that_draws_nothing_is_taken() -> None:
    model = Net(lambda m, x, generator: m.fc(x), fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    assert torch.equal(sharded(X, GENERATOR), model(X, GENERATOR))


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand_like(x)


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.rand_like(x)


def rewinds(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state)
    return noise


@pytest.mark.parametrize("noise", [seeds, forks, rewinds])
def test_seeds_set_in_a_forward_are_refused(noise: Any) -> None:
    model = Net(lambda m, x: m.fc(x) + noise(x), fc=linear())
    before = torch.get_rng_state()
    with pytest.raises(
        CaptureError, match=rf"sets the state of torch's random (.|\n)*{noise.__name__}"
    ):
        capture(model, (X,))
    assert torch.equal(torch.get_rng_state(), before)
    capture(Net(lambda m, x: m.fc(x) + torch.initial_seed() % 2, fc=linear()), (X,))


@torch.library.custom_op("graphshard_tests::add_in_place", mutates_args={"x"})
def add_in_place(x: Tensor) -> None:
    x.add_(1)


def custom_operator(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x).detach().clone()
    add_in_place(y)
    return m.fc(y)


class RunsAgain(torch.autograd.Function):
    """Computes its forward again in backward, on a module that it kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grad)
        return x.grad, None


class Sub(Tensor):
    pass


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (custom_operator, r"custom operator that writes into its arguments .*in custom_operator"),
        (
            lambda m, x: torch.cond(x.sum() > 0, lambda t: m.fc(t), lambda t: -m.fc(t), (x,)),
            r"takes functions \(torch\.cond, .*torch\.where",
        ),
        (lambda m, x: RunsAgain.apply(m.fc(x), m.fc), r"after the forward has ended.*in backward"),
        (lambda m, x: m.fc(x).as_subclass(Sub) * 2, "makes an instance of a class of tensors"),
        (lambda m, x: (m.fc(x), m.fc), "returns Linear, which holds the model's weights"),
        (lambda m, x: {"y": m.fc(x), "again": [m.fc.forward]}, r"returns Linear\.forward"),
        (lambda m, x: (lambda y: (y, lambda: y))(m.fc(x)), "returns .*lambda.*values of this call"),
    ],
)
def test_what_a_program_cannot_hold(forward: Any, said: str) -> None:
    sharded = graphshard.compile(Net(forward, fc=linear()), graphshard.SizePolicy(10))
    with pytest.raises(CaptureError, match=f"(?s){said}"):
        sharded(X)


def test_distributions_that_check_nothing_are_returned() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return torch.distributions.Normal(m.fc(x), x.abs(), validate_args=False)

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    for each in (model, sharded):
        (-each(X).log_prob(X).mean()).backward()
    assert torch.equal(sharded.get_submodule("fc").weight.grad, model.fc.weight.grad)


@pytest.mark.parametrize("whole", [False, True])
def test_functions_under_torch_compile_are_captured_as_they_are(whole: bool) -> None:
    @torch.compile(backend="eager")
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    part = torch.compile(linear(), backend="eager")
    model: Any = Net(lambda m, x: doubled(m.part(m.fc(x))), fc=linear(), part=part)
    if whole:
        model = torch.compile(model, backend="eager")
    x = X.clone().requires_grad_()
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    grads = []
    for each in (sharded, model):
        x.grad = None
        each(x).square().sum().backward()
        grads.append([t.grad.tolist() for t in (x, *each.parameters())])
    assert grads[0] == grads[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_capture_inside_torch_compile_is_refused() -> None:
    sharded = graphshard.compile(nn.Sequential(nn.Linear(4, 4)), graphshard.SizePolicy(10))
    capture = torch.compile(lambda x: sharded.capture((x,), {}), backend="eager")
    with pytest.raises(RuntimeStateError, match=r"inside torch\.compile; call it outside"):
        capture(X)


def test_a_misspelt_keyword_is_told_with_the_one_that_was_meant() -> None:
    class WithTargets(nn.Linear):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            return super().forward(x)

    sharded = graphshard.compile(WithTargets(2, 2), graphshard.SizePolicy(1))
    x = torch.zeros(1, 2)
    with pytest.raises(
        CaptureError, match=r"WithTargets\.forward\(\) .* did you mean targets"
    ) as error:
        sharded(x, tragets=None)
    assert len(error.traceback) <= 12
    with pytest.raises(CaptureError, match="keyword argument 'mask'; it takes x, targets"):
        sharded(x, mask=None)
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        sharded()
    renaming = WithTargets(2, 2)
    renaming.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"targets": kwargs["labels"]}), with_kwargs=True
    )
    assert graphshard.compile(renaming, graphshard.SizePolicy(1))(x, labels=x).shape == x.shape
