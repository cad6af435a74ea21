"""Code that decides by values: checked, answered by inputs and buffers, or refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import question_models as models
import torch
from capture_models import Net, X, linear
from loops import same_step

import graphshard
from graphshard.capture import captured, raising, recipes
from graphshard.errors import CaptureError, SizeCheckError
from graphshard.program.sizes import check_sizes
from graphshard.program.text import full_text

MASK = torch.ones(6, 4, dtype=torch.long)
POLICY = graphshard.SizePolicy(10)


def step(model, sharded, *args):
    same_step(model, sharded, *args, objective=lambda y: y.square().sum())


def checks(program):
    return [node.args[0] for node in program.nodes() if node.target is check_sizes]


# -- a branch that raises ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (models.asserts, 1),
        (models.asserts_not, 1),
        (models.asserts_both, 2),
        (models.raises, 1),
        (models.raises_unless, 1),
        (models.distribution, 2),
    ],
)
def test_a_branch_that_raises_is_a_check_of_one_program(forward, count, monkeypatch):
    # torch.compile turns the checks of distributions off for the rest of the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = Net(forward, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY, example_inputs=(X, MASK))
    assert len(checks(sharded.program)) == count
    for mask in (MASK, MASK * 2, MASK * 0):
        step(model, sharded, X, mask)
    with pytest.raises(SizeCheckError, match=rf"question_models\.py:\d+ in {forward.__name__}"):
        sharded(X, MASK - 5)
    step(model, sharded, X, MASK)
    assert len(sharded.programs) == 1


def test_such_a_check_may_be_about_activations():
    model = Net(models.asserts_on_activations, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    step(model, sharded, X, MASK)
    with pytest.raises(SizeCheckError, match=r"assert y\.isnan\(\)"):
        sharded(X * torch.nan, MASK)


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (models.plain, False),
        (models.loops, True),
        (models.either, None),
        (models.both_ways, None),
        (models.raises_if_more, None),
        (models.as_value, None),
        (models.many_ways, True),
    ],
)
def test_only_a_way_that_surely_raises_counts(function, answer, monkeypatch):
    monkeypatch.setattr(raising, "_TRACE", __file__)  # as if it were this test that traces
    asked = models.Asked()
    with contextlib.suppress(AssertionError, ValueError):
        function(asked)
    assert asked.answer is answer


# -- answers by inputs and buffers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "programs", "buffers"),
    [
        (models.hides, 2, dict),
        (models.starts, 2, models.starting),
        (models.repeats, 4, dict),
        (models.by_results_of_several, 2, dict),
        (models.by_a_literal, 2, dict),
        (models.rows_one_by_one, 3, dict),
        (models.values_one_by_one, 2, dict),
        (models.squeezes, 2, dict),
        (models.unbinds, 3, dict),
        (models.catches_itself, 2, dict),
        (models.of_no_effect, 2, dict),
        (models.by_a_remainder, 2, dict),
    ],
)
def test_each_answer_has_a_program_that_equals_eager(forward, programs, buffers):
    model = Net(forward, fc=linear(), **buffers())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY, check=True)
    masks = [MASK, MASK * 0, MASK.tril(), MASK * 2, MASK, MASK * -4, MASK * 0, MASK.triu()]
    for mask in masks:
        step(model, sharded, X, mask)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, sharded.get_buffer(name))
    assert len(sharded.programs) == programs


def test_a_dimension_that_activations_make_one_is_not_kept_in_silence():
    model = Net(models.squeezes_rows_by_activations, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY, check=True)
    first = model.fc(X)[:, 0].sort(descending=True).values
    for place in (3, 1, 2, 1):
        step(model, sharded, X, MASK * 0 + first[place].item())
    assert len(sharded.programs) == 2


def test_the_dump_says_for_which_answer_a_program_is(caplog):
    sharded = graphshard.compile(Net(models.hides, fc=linear()), POLICY)
    sharded(X, MASK)
    (note,) = sharded.program.notes
    assert note.startswith("serves calls in which the tensor is true, at question_models.py:")
    assert f"note: {note}" in full_text(sharded.program)
    sharded(X, MASK * 0)
    assert "answers of values: the tensor is false, at question_models.py:" in caplog.text


def test_a_plan_without_values_says_what_it_assumes():
    meta = X.to("meta"), MASK.to("meta")
    sharded = graphshard.compile(Net(models.hides, fc=linear()), POLICY, example_inputs=meta)
    assumed = [text for text in sharded.plan.warnings if "assumes that the tensor" in text]
    (text,) = assumed
    assert "if not mask.all()" in text
    step(Net(models.hides, fc=linear()), sharded, X, MASK * 0)


def test_a_program_keeps_no_tensor_of_its_example():
    sharded = graphshard.compile(Net(models.hides, fc=linear()), POLICY)
    x, mask = X.clone(), MASK.clone()
    left = [weakref.ref(x), weakref.ref(mask)]
    sharded(x, mask)
    del x, mask
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_questions_may_be_about_symbolic_sizes_too():
    def forward(m, x, lengths):
        y = m.fc(x)
        if lengths.max() < x.shape[0]:
            y = y * (torch.arange(x.shape[0]) < lengths.max())[:, None]
        return y

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(
        copy.deepcopy(model), POLICY, dynamic={"args[0]": {0: "batch"}}, check=True
    )
    for rows, longest in ((6, 5), (5, 5), (3, 2), (2, 2), (4, 4)):
        step(model, sharded, X[:rows], torch.tensor([longest, 1]))
    assert len(sharded.programs) == 2


def test_more_answers_than_there_may_be_programs(monkeypatch):
    monkeypatch.setattr(captured, "MOST_ANSWERS", 2)
    sharded = graphshard.compile(Net(models.repeats, fc=linear()), POLICY)
    sharded(X, MASK)
    sharded(X, MASK * 2)
    with pytest.raises(CaptureError, match=r"(?s)2 programs.*the number is 12, at .*repeats"):
        sharded(X, MASK * 3)
    sharded(X, MASK)


def test_a_program_that_asks_nothing_is_found_without_a_question(monkeypatch):
    sharded = graphshard.compile(Net(lambda m, x: m.fc(x), fc=linear()), POLICY)
    sharded(X)
    monkeypatch.setattr(recipes.Recipe, "item", None)
    sharded(X)
