"""Sizes that change between calls are symbols from the second shape on."""

from __future__ import annotations

import logging

import pytest
import torch
from capture_models import Asks, Net, linear
from loops import same_step
from models import TiedGPT
from torch import nn

import graphshard
from graphshard.errors import PassError, PolicyError
from graphshard.program.pass_protocol import Pass
from graphshard.program.text import full_text

POLICY = graphshard.SizePolicy(1)


def tokens(*shape):
    return torch.randint(19, shape)


def tied(**options):
    torch.manual_seed(0)
    model = TiedGPT(layers=1).eval()  # without dropout
    return model, graphshard.compile(model, POLICY, check=True, **options).eval()


def step(model, sharded, *args, **kwargs):
    """Run both forward and backward; the number of programs after it."""
    same_step(model, sharded, *args, **kwargs)
    return len(sharded.programs)


def ids(*shape):
    return tokens(*shape), tokens(*shape)


# -- auto ----------------------------------------------------------------------------------------


def test_the_second_shape_makes_the_program_of_all_later_ones():
    model, sharded = tied()
    counts = [
        step(model, sharded, *ids(*shape))
        for shape in [(4, 7), (4, 7), (3, 5), (4, 7), (2, 9), (6, 6), (5, 2)]
    ]
    assert counts == [1, 1, 2, 2, 2, 2, 2]
    text = full_text(sharded.program)
    assert "size batch: dim 0 of args[0], dim 0 of args[1]; at least 2" in text
    assert "size length: dim 1 of args[0], dim 1 of args[1]; at least 2" in text


def test_the_smaller_last_batch_of_an_epoch_leaves_the_length_fixed():
    model, sharded = tied()
    counts = [step(model, sharded, *ids(batch, 7)) for batch in (4, 4, 3, 4, 4, 2)]
    assert counts == [1, 1, 2, 2, 2, 2]
    assert "i64[batch, 7]" in full_text(sharded.program)
    assert [step(model, sharded, *ids(*shape)) for shape in ((4, 9), (3, 8))] == [3, 3]


def test_a_batch_of_one_has_programs_of_its_own():
    model, sharded = tied()
    counts = [
        step(model, sharded, *ids(*shape))
        for shape in [(1, 7), (1, 5), (1, 9), (3, 5), (1, 4), (2, 8), (2, 1), (4, 1)]
    ]
    assert counts == [1, 2, 2, 3, 3, 3, 4, 4]


def test_evaluation_knows_what_training_learned():
    model, sharded = tied()
    for shape in [(4, 7), (3, 5)]:
        step(model, sharded, *ids(*shape))
    with torch.no_grad():
        for shape in [(5, 6), (2, 9)]:
            given = ids(*shape)
            assert torch.equal(model(*given), sharded(*given))
            assert torch.equal(
                model(given[0], targets=given[1]), sharded(given[0], targets=given[1])
            )
    assert len(sharded.programs) == 4  # two structures of a call


def two(m, x, y):
    return m.fc(x).sum() + 2 * m.fc(y).sum()


def test_sizes_that_were_equal_by_chance_get_names_of_their_own():
    torch.manual_seed(0)
    model = Net(two, fc=linear())
    sharded = graphshard.compile(model, POLICY)
    counts = [
        step(model, sharded, torch.randn(a, 4), torch.randn(b, 4))
        for a, b in [(5, 5), (3, 3), (6, 6), (2, 7), (5, 5), (8, 3)]
    ]
    assert counts == [1, 2, 2, 3, 3, 3]


class Positions(nn.Module):
    """Takes any batch, and sequences of 6 or of any length with `anywhere`."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.places = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        y = self.lin(x)
        return (y + self.places[: len(x[0])] if x.shape[1] <= 6 else y).relu().sum()


def test_a_size_that_the_model_fixes_stays_fixed_with_a_note(caplog):
    torch.manual_seed(0)
    model = Positions()
    sharded = graphshard.compile(model, POLICY)
    with caplog.at_level(logging.INFO, "graphshard"):
        counts = [
            step(model, sharded, torch.randn(batch, length, 4))
            for batch, length in [(4, 3), (3, 5), (2, 5), (5, 4), (7, 4), (7, 3), (2, 3)]
        ]
    assert counts == [1, 2, 2, 3, 3, 4, 4]
    (note,) = [n for n in sharded.programs[1].notes if "dynamic" in n]
    assert "dim 1 of args[0] (length) is to be dynamic, but the model fixes it to 5" in note
    assert "len(x[0])" in note
    assert not sharded.programs[3].notes  # given up, not asked again
    said = [record.getMessage() for record in caplog.records]
    assert sum("the model fixes it" in text for text in said) == 2


def test_a_broken_guard_captures_another_program_of_the_same_names():
    torch.manual_seed(0)
    model = Asks()
    sharded = graphshard.compile(model, POLICY)
    shapes = [(2, 4), (3, 6), (2, 5), (3, 7), (4, 6)]
    for shape in shapes:
        x = torch.randn(*shape, 4)
        assert torch.equal(sharded(x), model(x)), shape
    assert len(sharded.programs) == 3


def test_the_first_shape_keeps_its_program():
    model, sharded = tied()
    step(model, sharded, *ids(4, 7))
    step(model, sharded, *ids(3, 5))
    runs = [sharded._graphshard.programs.step_for(ids(*shape), {})[0] for shape in ((4, 7), (2, 9))]
    assert [run.program for run in runs] == [*sharded.programs]
    assert [run.program.sizes is None for run in runs] == [True, False]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (POLICY, {"dynamic": None}),
        (graphshard.SizePolicy(1, memory_budget="1GiB", recompute="budget"), {}),
        (graphshard.SizePolicy(1, cuda_graph=True), {}),
    ],
)
def test_each_shape_has_a_program_if_asked_or_where_a_policy_decides_by_it(policy, options):
    model = TiedGPT(layers=1).eval()
    sharded = graphshard.compile(model, policy, check=True, **options).eval()
    assert [step(model, sharded, *ids(*s)) for s in [(4, 7), (3, 5), (2, 9)]] == [1, 2, 3]
    assert all(program.sizes is None for program in sharded.programs)


def test_a_plan_has_one_call_to_learn_from():
    with pytest.raises(PolicyError, match="learns from the calls of a sharded module"):
        graphshard.plan(TiedGPT(), POLICY, example_inputs=ids(4, 7), dynamic="auto")
    with pytest.raises(PolicyError, match='or be "auto"'):
        graphshard.compile(TiedGPT(), POLICY, dynamic="automatic")


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, batch, *, weight):
        return (self.conv(batch["pixels"]).mean((1, 2, 3)) * weight).sum()


def images(batch, height, width):
    return {"pixels": torch.randn(batch, 3, height, width)}, torch.rand(batch)


def test_what_changes_is_named_by_its_path():
    model = Images()
    sharded = graphshard.compile(model, POLICY)
    counts = []
    for shape in [(4, 8, 9), (3, 8, 7), (6, 8, 12), (2, 8, 5)]:
        batch, weight = images(*shape)
        counts.append(step(model, sharded, batch, weight=weight))
    assert counts == [1, 2, 2, 2]
    text = full_text(sharded.program)
    assert "size batch: dim 0 of args[0]['pixels'], dim 0 of kwargs['weight']; at least" in text
    assert "size batch_pixels_3: dim 3 of args[0]['pixels']; at least" in text


class Deciding(Pass):
    """A pass of a user's that decides by a size."""

    name = "deciding"

    def apply(self, program, plan):
        program.notes += ("large",) if program.inputs[0].node.meta["val"].shape[0] > 3 else ()


def test_a_pass_that_decides_by_a_size_gets_fixed_ones(caplog):
    model = Positions()
    sharded = graphshard.compile(model, POLICY, passes=[Deciding()])
    with caplog.at_level(logging.INFO, "graphshard"):
        counts = [step(model, sharded, torch.randn(batch, 3, 4)) for batch in (4, 3, 4, 3, 5, 2, 6)]
    assert counts == [1, 2, 2, 2, 3, 4, 5]
    assert all(program.sizes is None for program in sharded.programs)
    assert "pass deciding" in caplog.text
    sharded = graphshard.compile(model, POLICY, passes=[Deciding()], dynamic={"x": {0: "batch"}})
    for _ in range(2):  # it is not forgotten that the pass failed
        with pytest.raises(PassError, match="decided by a symbolic size"):
            sharded(torch.randn(4, 3, 4))


def test_the_first_shape_keeps_its_program_whatever_comes_between():
    model, sharded = tied()
    step(model, sharded, *ids(4, 7))
    programs = sharded._graphshard.programs
    first = programs.step_for(ids(4, 7), {})[0]
    for train in (True, False):
        for grad in (True, False):
            sharded.train(train)
            with torch.set_grad_enabled(grad):
                sharded(*ids(3, 5))
    assert programs.step_for(ids(4, 7), {})[0] is first
