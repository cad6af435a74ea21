"""Random numbers drawn on the host are inputs of a program, which each call draws as eager does."""

from __future__ import annotations

import copy
import random
import warnings
from random import gauss

import numpy
import pytest
import torch
from capture_models import Net, X, linear
from torch import nn
from transformers.models.wav2vec2 import modeling_wav2vec2

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError

POLICY = graphshard.SizePolicy(10)


def layers(count=4):
    return nn.ModuleList(linear() for _ in range(count))


def skips(draw):
    def forward(m, x):
        for layer in m.layers:
            if draw() < 0.5:
                continue
            x = x + layer(x).tanh()
        return m.fc(x)

    return forward


def skips_if_true(m, x):
    for layer in m.layers:
        if torch.bernoulli(torch.tensor(0.4)).item():
            x = x + layer(x).tanh()
    return m.fc(x)


def skips_within(m, x):
    for layer in m.layers:
        number = torch.rand(()).item()
        if not (number >= 0.25 and number < 0.75) or number == 0.5:
            x = x + layer(x).tanh()
    return m.fc(x)


def scales(m, x):
    return m.fc(x * random.uniform(0.5, b=1.5)) + numpy.random.beta(0.4, 0.4)


def chooses(m, x):
    one = m.layers[random.randrange(3)]
    other = m.layers[numpy.random.randint(1, high=3)]
    return random.choice([m.fc, one])(other(x))


def forces_teacher(m, x):
    forced, state = random.random() < 0.5, x
    for layer in m.layers:
        state = layer(x if forced else state)
    return m.fc(state)


def drops_the_condition(m, x):
    context = m.fc(x)
    if torch.rand(1) < 0.5:
        context = torch.zeros_like(context) + m.null
    return m.layers[0](context)


def goes_deeper(m, x):
    for _ in range(torch.randint(1, 4, (1,)).item()):
        x = m.layers[0](x).tanh()
    return m.fc(x)


def draws_by_what_was_drawn(m, x):
    if random.random() < 0.5:
        return m.fc(x) if random.random() < 0.5 else m.layers[0](x)
    return m.layers[1](x)


def skips_by_torch_and_on_the_host(m, x):
    x = m.layers[0](x) * random.uniform(0.5, 1)
    for layer in m.layers[1:]:
        if torch.rand(()) < 0.5 or x.dim() == 1:
            x = layer(x)
        if random.random() < 0.5:
            x = x.tanh()
    return m.fc(x)


def chooses_by_torch_and_scales_on_the_host(m, x):
    x = m.layers[0](x) if torch.rand(()) < 0.5 else m.layers[1](x)
    return m.fc(x) * random.random()


def draws_noise_after(m, x):
    x = m.layers[0](x) if torch.rand(()) < 0.5 else m.layers[1](x).tanh()
    return m.fc(x + torch.randn(x.shape[0], 4))


def draws_noise_before(m, x):
    noise = torch.randn(x.shape[0], 4)
    return m.fc(x + 0 * noise) if torch.rand(()) < 0.5 else m.layers[1](x + noise).tanh()


def scales_by_arrays(m, x):
    noise = torch.from_numpy(numpy.random.normal(0, 0.1, size=[1, 4])).float().to(x)
    kept = torch.tensor(numpy.random.rand(4) > 0.3, device=x.device)
    order = torch.as_tensor(numpy.random.permutation(4)[:3], device=x.device)
    return m.fc((x + noise) * kept)[:, order] * numpy.random.rand()


def indexes_by_arrays(m, x):
    x = x.clone()
    x[:, numpy.random.choice(4, 2, replace=False)] = 0.0
    return m.fc(x[:, numpy.random.permutation(4)])


def samples_layers(m, x):
    for layer in random.sample([*m.layers], 2):
        x = layer(x).tanh()
    return m.fc(x)


def shuffles_layers(m, x):
    order = [0, 1, 2]
    random.shuffle(order)
    for place in order + random.choices(population=[0, 1], weights=[1, 2], k=1):
        x = m.layers[place](x).tanh()
    return m.fc(x)


def same_as_eager(model, sharded, x=X, seeds=8):
    """The same losses, gradients (zeros where eager has none) and states of the generators."""
    for seed in range(seeds):
        found = []
        for each in (model, sharded):
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            each.zero_grad()
            loss = each(x).square().sum()
            loss.backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in each.parameters()]
            found.append((loss, *grads, random.random(), numpy.random.rand(), torch.rand(())))
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


@pytest.mark.parametrize(
    ("forward", "programs"),
    [
        (skips(lambda: random.random()), 1),
        (skips(lambda: gauss(0.5, 1)), 1),
        (skips(lambda: numpy.random.rand()), 1),
        (skips(lambda: numpy.random.normal(0.5)), 1),
        (skips(lambda: torch.rand(1).item()), 1),
        (skips_if_true, 1),
        pytest.param(skips_within, None, marks=pytest.mark.slow),
        (scales, 1),
        (forces_teacher, 2),
        (drops_the_condition, 1),
        (goes_deeper, 3),
        (draws_by_what_was_drawn, 3),
        (draws_noise_after, 2),
        (skips_by_torch_and_on_the_host, 1),
        (chooses_by_torch_and_scales_on_the_host, 2),
        (scales_by_arrays, 1),
        (indexes_by_arrays, 1),
        (samples_layers, None),
        pytest.param(shuffles_layers, None, marks=pytest.mark.slow),
        (chooses, None),
    ],
)
def test_calls_draw_as_in_eager(forward, programs):
    model = Net(forward, fc=linear(), layers=layers(), null=torch.ones(()))
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "operators that the forward skips")
        warnings.filterwarnings("ignore", "more than 8 programs")
        same_as_eager(model, sharded)
    if programs is not None:
        assert len(sharded.programs) == programs


@pytest.mark.cuda
@pytest.mark.parametrize(
    "forward",
    [
        skips(lambda: random.random()),
        skips(lambda: torch.rand(1, device="cuda").item()),
        scales,
        scales_by_arrays,
    ],
)
def test_calls_on_cuda_draw_as_in_eager(forward):
    """Numbers of the host stay there, those of the device come from its generator."""
    model = Net(forward, fc=linear(), layers=layers()).cuda()
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    same_as_eager(model, sharded, X.cuda(), seeds=4)
    assert len(sharded.programs) == 1


def test_larger_draws_of_torch_are_operators():
    model = Net(draws_noise_before, fc=linear(), layers=layers())
    program = capture(model, (X.repeat(5, 1),)).program
    assert [entry.path for entry in program.inputs] == ["args[0]", "draws[0]"]


def test_a_dump_shows_what_is_drawn():
    model = Net(scales, fc=linear())
    program = capture(model, (X,)).program
    assert [entry.path for entry in program.inputs] == ["args[0]", "draws[0]", "draws[1]"]
    assert program.notes == (
        "draws random.uniform(0.5, b=1.5) before each call",
        "draws numpy.random.beta(0.4, 0.4) before each call",
    )


def test_sizes_may_be_symbols():
    model = Net(scales, fc=linear())
    sharded = graphshard.compile(
        copy.deepcopy(model), POLICY, example_inputs=(X,), dynamic={"args[0]": {0: "n"}}
    )
    same_as_eager(model, sharded)
    same_as_eager(model, sharded, X[:3])
    assert len(sharded.programs) == 1


def fills_an_array(m, x):
    mask = numpy.zeros(4)
    mask[numpy.random.choice(4, 2)] = 1.0
    return m.fc(x) * torch.tensor(mask)


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda m, x: m.fc(x) * float(numpy.random.rand()), r"by numpy\.random\.rand\(\), which"),
        (fills_an_array, r"by numpy\.random\.choice\(4, 2\), which"),
        (lambda m, x: m.fc(x) * numpy.random.dirichlet([1, 1])[0], r"from numpy\.random in a way"),
        (lambda m, x: m.fc(x) * m.own.random(), r"from own \(a Random\) in a way"),
        (lambda m, x: m.fc(x) * m.of_numpy.random(), r"from of_numpy \(a Generator\) in a way"),
        (
            lambda m, x: m.fc(x) * numpy.random.default_rng().random(),
            r"from numpy\.random\.default_rng\(\) w",
        ),
        (
            lambda m, x: m.fc(x) * random.random() * m.own.random(),
            r"from own \(a Random\) in a way",
        ),
    ],
)
def test_what_no_call_could_draw_again_is_refused(forward, named):
    """A program would train with the numbers that its capture saw."""
    model = Net(forward, fc=linear())
    model.own, model.of_numpy = random.Random(0), numpy.random.default_rng(0)
    with pytest.raises(CaptureError, match=f"draws random numbers {named}"):
        graphshard.compile(model, POLICY, example_inputs=(X,))


def test_numbers_of_a_seed_that_forward_sets_are_the_same_in_each_call():
    def forward(m, x):
        numpy.random.seed(m.seed)
        kept = numpy.zeros(4)
        kept[numpy.random.permutation(4)[:2]] = numpy.random.default_rng(m.seed).random()
        return m.fc(x) * torch.tensor(kept).float()

    model = Net(forward, fc=linear())
    model.seed = 3
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    for seed in (3, 4):
        model.seed = sharded.seed = seed
        assert torch.equal(model(X), sharded(X))
    (note,) = sharded.program.notes
    assert note.startswith("forward seeds numpy.random;")


def test_a_number_that_python_needs_is_refused():
    model = Net(lambda m, x: m.fc(x) if float(torch.rand(())) < 0.5 else x, fc=linear())
    with pytest.raises(CaptureError, match=r"take `tensor\.item\(\)` instead of `float\(tensor\)`"):
        graphshard.compile(model, POLICY, example_inputs=(X,))


class Augmenting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.null = linear(), nn.Parameter(torch.ones(4))

    def forward(self, x, padding):
        mask = modeling_wav2vec2._compute_mask_indices(
            (x.shape[0], x.shape[1]), 0.4, 2, attention_mask=padding, min_masks=1
        )
        x = self.fc(x)
        x[torch.tensor(mask, device=x.device, dtype=torch.bool)] = self.null
        return x.sin() * x


@pytest.mark.parametrize("fields", [{}, {"recompute": "units"}])
def test_spec_augment_draws_in_each_call(fields):
    """Its mask is larger than the state of a generator, and yet not drawn again."""
    padding = torch.arange(2000) < torch.tensor([[2000], [2000], [1500]])
    model = Net(lambda m, x: m.blocks[1](m.blocks[0](x, None), padding).sum())
    model.blocks = nn.ModuleList(Augmenting() for _ in range(2))
    policy = graphshard.BlockPolicy({Augmenting}, **fields)
    same_as_eager(model, graphshard.compile(copy.deepcopy(model), policy), torch.randn(3, 2000, 4))
