"""Compiled regions on one rank: what calls them, what happens where compiling does not work."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from models import Block, TiedGPT
from torch import Tensor, nn

import graphshard
from graphshard.errors import RuntimeStateError, UnsupportedTorchError
from graphshard.runtime.region import rotated
from graphshard.torch_private import inductor as torch_inductor

BLOCK = graphshard.BlockPolicy(Block)
TOLERANCE = 1e-5


def tokens(length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(0, 19, (2, 3, length), generator=generator))


def trained(model: nn.Module, backend: str, policy: Any = BLOCK, **options: Any) -> tuple[Any, Any]:
    """Losses and gradients of two steps, and a loss in eval mode; the module."""
    batches = options.pop("batches", None) or [tokens(), tokens()]
    sharded = graphshard.compile(model, policy, backend=backend, **options)
    optim = torch.optim.SGD(sharded.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        loss = sharded(*batch)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in sharded.parameters())]
        found.append(torch.rand(3))  # draws what follows in the random stream
        optim.step()
        optim.zero_grad()
    sharded.eval()
    with torch.no_grad():
        found.append(sharded(*batches[0]))
    found += [buffer.clone() for buffer in sharded.buffers()]
    return found, sharded


def close(left: list[Tensor], right: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def by_torch(monkeypatch, change=lambda graph, run: run) -> list[Any]:
    """Let regions be "compiled" to their own operators, or what `change` makes of them."""
    made: list[Any] = []

    def compiled(graph: Any, inputs: Any, mode: Any) -> Any:
        made.append(graph)
        return change(graph, graph.forward)

    monkeypatch.setattr(torch_inductor, "compile_graph", compiled)
    return made


class Draws(nn.Module):
    """Numbers that each of `draws` makes for a value, and numbers drawn after them."""

    def __init__(self, draws: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.draws = draws

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = (x * self.weight).detach()
        return *(draw(x) * self.weight for draw in self.draws), torch.rand(2)


def draws(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every operator of torch that draws random numbers on CPUs."""
    empty, full = torch.empty_like, torch.full_like
    shape = (5, 4, 6)
    return {
        "bernoulli": lambda x: torch.bernoulli(full(x, 0.5)),
        "bernoulli of a view": lambda x: torch.bernoulli(full(x, 0.5).transpose(0, 1)).mT.mT,
        "bernoulli_ by a number": lambda x: empty(x).bernoulli_(0.3),
        "bernoulli_ by a tensor": lambda x: empty(x).bernoulli_(full(x, 0.4)),
        "binomial": lambda x: torch.binomial(full(x, 9.0), full(x, 0.4)),
        "cauchy_": lambda x: empty(x).cauchy_(),
        "dirichlet": lambda x: torch._sample_dirichlet(full(x, 3.0)),
        "dropout": lambda x: nn.functional.dropout(x, 0.4),
        "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.4, True),
        "exponential_": lambda x: empty(x).exponential_(2.0),
        "gamma": lambda x: torch._standard_gamma(full(x, 3.0)),
        "geometric_": lambda x: empty(x).geometric_(0.3),
        "log_normal_": lambda x: empty(x).log_normal_(),
        "multinomial": lambda x: torch.multinomial(full(x, 1.0)[0], 3).to(dtype).sum(),
        "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
        "normal of two tensors": lambda x: torch.normal(full(x, 1.0), full(x, 2.0)),
        "normal by a number": lambda x: torch.normal(full(x, 1.0), 2.0),
        "normal_": lambda x: empty(x).normal_(1, 2),
        "poisson": lambda x: torch.poisson(full(x, 3.0)),
        "rand": lambda x: torch.rand(shape, dtype=dtype),
        "rand_like": torch.rand_like,
        "randint": lambda x: torch.randint(-3, 9, shape, dtype=dtype),
        "randint_like": lambda x: torch.randint_like(x, 9),
        "randn": lambda x: torch.randn(shape, dtype=dtype),
        "randn_like": torch.randn_like,
        "random_": lambda x: empty(x).random_(),
        "random_ from": lambda x: empty(x).random_(2, 9),
        "random_ to": lambda x: empty(x).random_(9),
        "randperm": lambda x: torch.randperm(6).to(dtype),
        "rrelu": lambda x: nn.functional.rrelu(x, training=True),
        "uniform_": lambda x: empty(x).uniform_(1, 3),
    }


def check_draws(dtype: torch.dtype, backend: str, names: Iterable[str]) -> None:
    x = torch.linspace(-1, 1, 120, dtype=dtype).view(5, 4, 6)
    eager = Draws([draws(dtype)[name] for name in names]).to(dtype)
    sharded = graphshard.compile(eager, graphshard.LambdaPolicy(lambda _: False), backend=backend)
    torch.manual_seed(7)
    *expected, last = (*eager(x), torch.get_rng_state())
    torch.manual_seed(7)
    *got, now = (*sharded(x), torch.get_rng_state())
    assert torch.equal(now, last)
    for name, mine, theirs in zip((*names, "after"), got, expected, strict=True):
        if backend == "inductor" and dtype.itemsize == 2 and name != "after":
            # Compiled code rounds less often: by one unit of the largest value where a sum cancels.
            unit = torch.finfo(dtype).eps
            atol = unit * theirs.abs().max().item()
            torch.testing.assert_close(mine, theirs, rtol=unit, atol=atol)
        else:
            assert torch.equal(mine, theirs), name


IN_FLOAT64 = ("bernoulli", "bernoulli of a view", "random_ from")


@pytest.mark.slow
def test_numbers_for_float64_are_those_of_eager():
    check_draws(torch.float64, "inductor", IN_FLOAT64)


NOT_OF_TWO_BYTES = {"binomial", "dirichlet", "gamma"}  # eager has no kernel


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_random_operator_draws_the_numbers_of_eager(dtype, backend):
    without = NOT_OF_TWO_BYTES if dtype.itemsize == 2 else set()
    without = without | ({"rrelu"} if dtype == torch.float16 else set())
    check_draws(dtype, backend, [name for name in draws(dtype) if name not in without])


def test_one_function_for_each_form(monkeypatch):
    made = by_torch(monkeypatch)
    _, sharded = trained(TiedGPT(3), "inductor")
    train, evaluated = (program.regions for program in sharded.programs)
    assert max(train.distinct, evaluated.distinct) <= len(made)
    assert len(made) <= train.distinct + evaluated.distinct < len(train.forms)


@torch.library.custom_op("graphshard_tests::widened", mutates_args=())
def widened(x: Tensor) -> Tensor:
    """Gives float64, and states the dtype of `x`."""
    return x.double()


widened.register_fake(torch.empty_like)


class Widened(nn.Module):
    """A unit of one operator, which is no region."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return widened(self.shift.detach())


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift, self.last = nn.Linear(4, 4), Widened(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.first(x), self.shift()
        return self.last(x.tanh() * shift)


SHIFTED = graphshard.BlockPolicy((nn.Linear, Widened))


def test_a_region_refuses_what_a_kernel_gives_otherwise_than_stated(monkeypatch):
    made = by_torch(monkeypatch)
    sharded = graphshard.compile(Shifted(), SHIFTED, backend="inductor")
    for _ in range(2):
        with pytest.raises(RuntimeStateError) as caught:
            sharded(torch.ones(2, 4))
        assert re.search(
            r"graphshard_tests\.widened\.default in forward gave \w+ as \(4,\) torch\.float64, "
            r"its program says \(4,\) torch\.float32\n.*in forward: return widened.*\n.*"
            r"compiled region \d in forward is made for",
            str(caught.value),
        )
    assert made


def test_what_a_kernel_gives_otherwise_is_no_fault_of_a_pass(caplog):
    model = Shifted()
    model.last = nn.Identity()
    sharded = graphshard.compile(model, SHIFTED, check=True)
    with torch.no_grad():
        assert sharded(torch.ones(2, 4)).dtype == torch.float64
    assert "graphshard_tests.widened.default in forward gave" in caplog.text
    assert len([record for record in caplog.records if record.name == "graphshard"]) == 1


def test_ranks_of_a_host_compile_from_different_ends():
    forms = list("abcdefg")
    assert rotated(forms, 0, 1) == forms
    assert rotated(forms, 1, 2) == forms[::-1]
    begins = [rotated(forms, rank, 8) for rank in range(8)]
    assert all(sorted(order) == forms for order in begins)
    assert {order[0] for order in begins} == set(forms)
    assert rotated([], 1, 2) == []


def test_what_cannot_be_compiled_falls_back_alone(monkeypatch):
    def change(graph, run):
        if any(node.target is torch.ops.aten.gelu.default for node in graph.graph.nodes):
            raise RuntimeError("no such luck\nand more")
        return run

    by_torch(monkeypatch, change)
    torch.manual_seed(0)
    model = TiedGPT(2)
    expected, _ = trained(model, "eager")
    batch = tokens()
    sharded = graphshard.compile(model, BLOCK, example_inputs=batch, backend="inductor")
    text = str(sharded.plan)
    # Before torch 2.13 random operators are in no region, so that there are others between.
    which = r"region \d+ \(forward of blocks.{}, \d+ operators\)"
    assert re.search(f"{which.format(0)}, {which.format(1)}", text)
    assert "fell back: RuntimeError: no such luck" in text
    assert "and more" not in text
    assert len(sharded.plan.program.regions.fell_back) == 2
    assert "fell back" in str(sharded.program)
    found, _ = trained(model, "inductor")
    assert all(map(torch.equal, expected, found))


def test_results_that_share_memory_otherwise_are_copied(monkeypatch):
    """As a copy that a compiler leaves out: freeing the parameter would take it along."""

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * 2 + 1) * self.weight.clone()

    def change(graph, run):
        def aliasing(args):
            given = [arg for arg in args if isinstance(arg, Tensor)]
            results = run(args)
            return [
                next((arg for arg in given if torch.equal(arg, result)), result)
                for result in results
            ]

        return aliasing

    model = Copies()
    x = torch.full((4,), 3.0)
    plain = graphshard.compile(model, graphshard.SizePolicy(min_num_params=1))
    expected = plain(x)
    by_torch(monkeypatch, change)
    sharded = graphshard.compile(
        model, graphshard.SizePolicy(min_num_params=1), backend="inductor", check=True
    )
    for _ in range(2):
        assert torch.equal(sharded(x), expected)


def test_regions_hold_nothing_of_what_they_are_given(monkeypatch):
    held: list[bool] = []

    def change(graph, run):
        def emptied(args):
            results = run(list(args))
            watched = [
                weakref.ref(arg) for arg in args if isinstance(arg, Tensor) and arg._base is None
            ]
            args.clear()
            held.append(any(one() is None for one in watched))
            return results

        return emptied

    by_torch(monkeypatch, change)
    trained(TiedGPT(2), "inductor")
    assert any(held)  # activations used for the last time are gone within the region


def test_other_strides_than_captured_run_operator_by_operator(monkeypatch):
    by_torch(monkeypatch)
    sharded = graphshard.compile(TiedGPT(1), BLOCK, example_inputs=tokens(), backend="inductor")
    call = next(n.target for n in sharded.lowered[0].graph.nodes if n.name == "region_0")
    vals = call.form._vals
    call([torch.zeros(val.shape).as_strided(val.shape, (0,) * val.dim()) for val in vals])
    assert "an input has strides (0, 0, 0), at capture it had (112, 16, 1)" in str(sharded.plan)
    assert call._run == call.form.module.forward


def test_a_weight_in_channels_last_whose_channel_is_one():
    """Its strides, which a gather does not keep, choose the format of a convolution's result."""
    torch.manual_seed(0)
    weight = nn.Conv2d(1, 3, 3).to(torch.float64, memory_format=torch.channels_last)
    model = nn.Sequential(weight, nn.ReLU(), nn.Conv2d(3, 1, 1).double())
    policy = graphshard.LambdaPolicy(lambda module: False)
    sharded = graphshard.compile(model, policy, backend="inductor")
    x = torch.randn(2, 1, 4, 8, dtype=torch.float64)
    for each in (model, sharded):
        each(x).square().sum().backward()
    torch.testing.assert_close(sharded.get_parameter("0.weight").grad, weight.weight.grad)


class Spread(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        largest = y.max(-1).values
        return x + 0.1 * (y + y.std(1, keepdim=True)), largest


def test_what_is_scattered_into_zeros_is_there_when_it_is_read(monkeypatch):
    """`torch.compile` of torch 2.13 reads the zeros."""
    model = Spread(4, 4)
    x = torch.randn(3, 5, 4)
    policy = graphshard.LambdaPolicy(lambda module: False)
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    sharded = graphshard.compile(model, policy, example_inputs=(x,), backend="inductor")
    for module in (model, sharded):
        sum((part + 0.1).square().mean() for part in module(x)).backward()
    close([p.grad for p in sharded.parameters()], [p.grad for p in model.parameters()])


def test_sizes_beyond_what_was_compiled_run_operator_by_operator(monkeypatch):
    """A compiler may decide by a size; then what it made is right for some calls only."""
    compiled_calls: list[int] = []

    def compiled(graph: Any, inputs: Any, mode: Any) -> Any:
        sizes = [given for given in inputs if isinstance(given, torch.SymInt)]
        assert all(size % 7 == 0 for size in sizes[:1])  # a guard

        def run(args: Any) -> Any:
            compiled_calls.append(args[0])
            return graph.forward(args)

        return run

    monkeypatch.setattr(torch_inductor, "compile_graph", compiled)
    torch.manual_seed(0)
    model = TiedGPT(1)
    names = {"tokens": {1: "length"}, "targets": {1: "length"}}
    batches = [tokens(7), tokens(5), tokens(14)]
    expected, _ = trained(model, "eager", dynamic=names, batches=batches)
    found, _ = trained(model, "inductor", dynamic=names, batches=batches)
    assert all(map(torch.equal, expected, found))
    assert {7, 14} == {size for size in compiled_calls if isinstance(size, int)}


def test_outputs_without_gradients_have_regions_of_their_own(monkeypatch):
    by_torch(monkeypatch)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(dropout=0.0) for _ in range(2)])

        def forward(self, x):
            y = self.blocks[0](x)
            return self.blocks[1](y).square().mean(), y.exp().sum()

    model = Two()
    x = torch.randn(5, 16)
    grads = []
    for backend in ("eager", "inductor"):
        sharded = graphshard.compile(model, BLOCK, backend=backend)
        sharded(x)[0].backward()
        grads.append([p.grad.clone() for p in sharded.parameters()])
    assert all(map(torch.equal, *grads))


def test_another_torch_is_refused(monkeypatch):
    def other(graph, inputs, how):
        raise AssertionError

    monkeypatch.setattr(torch_inductor, "private", lambda module, name: other)
    with pytest.raises(UnsupportedTorchError, match='backend="eager"'):
        graphshard.compile(TiedGPT(1), BLOCK, backend="inductor")
