"""Code that decides by what it computes: a program guesses, and a wrong guess runs again."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref

import numpy
import pytest
import question_models as models
import torch
from capture_models import Net, X, linear
from loops import same_step
from torch import nn

import graphshard
from graphshard.capture import captured
from graphshard.errors import CaptureError
from graphshard.program.sizes import check_sizes
from graphshard.program.text import full_text

POLICY = graphshard.SizePolicy(10)


def step(model, sharded, *args):
    same_step(model, sharded, *args, objective=lambda y: y.square().sum())


def guesses(program):
    return [node.kwargs["guess"] for node in program.nodes() if "guess" in node.kwargs]


def is_hot(m, x):
    return m.fc(x).mean() > 0


@pytest.mark.parametrize(
    "question",
    [
        lambda m, x: m.fc(x).mean() > 0,
        lambda m, x: m.fc(x).std() > 5,
        lambda m, x: m.fc(x).argmax() == 0,
        lambda m, x: m.fc(x).argmax() != 5,
        lambda m, x: (x > 0).sum() > m.fc(x).sum(),
        lambda m, x: (m.plain > 1).any(),
        lambda m, x: torch.as_tensor(m.array).sum() > 1,
    ],
)
def test_each_answer_has_a_program(question):
    model = Net(lambda m, x: m.fc(x.cos() if question(m, x) else x.sin()), fc=linear())
    model.plain, model.array = torch.tensor(0), numpy.zeros(3)
    sharded = graphshard.compile(copy.deepcopy(model), POLICY, check=True)
    answers = set()
    for shift in (0.0, -4.0, 9.0, 0.0, -4.0):
        answers.add(bool(question(model, X + shift)))
        step(model, sharded, X + shift)
    # A guess may be wrong at first.
    assert len(answers) <= len(sharded.programs) <= 2


def test_what_holds_for_all_ordinary_numbers_is_guessed():
    model = Net(models.clamps, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    step(model, sharded, X)
    for factor in (torch.inf, 1e6):
        with torch.no_grad():
            found, expected = sharded(X * factor), model(X * factor)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert [*map(guesses, sharded.programs)] == [[0, 1], [0, 1], [0], [0, 1]]


def test_a_forward_that_runs_again_leaves_nothing_of_the_first_run():
    """Buffers, dropout's bits, numbers of the host and plain values are those of one run."""

    def forward(m, x):
        y = m.drop(m.norm(m.fc(x))) * random.random() * numpy.random.rand()
        m.hot = y.sum() > 0.0
        if m.hot:
            m.last = "hot"
            return m.fc(y)
        m.last = "cold"
        return m.norm(y).sin()

    parts = {"fc": linear(), "norm": nn.BatchNorm1d(4), "drop": nn.Dropout(0.4)}
    model = Net(forward, **parts)
    model.hot, model.last = torch.tensor(False), ""
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    after = []
    for each in (model, sharded):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        losses, ways = [], []
        for _ in range(6):
            each.zero_grad()
            losses.append(each(X).square().sum())
            losses[-1].backward()
            ways.append((each.last, bool(each.hot)))
        grads = [param.grad for param in each.parameters()]
        numbers = random.random(), numpy.random.rand(), ways
        after.append(([*losses, *grads, *each.buffers(), torch.rand(3)], numbers))
    assert after[0][1] == after[1][1]
    assert {("hot", True), ("cold", False)} == {*ways}
    assert all(map(torch.equal, after[0][0], after[1][0]))


def test_nothing_holds_what_a_wrong_run_made():
    model = Net(lambda m, x: m.fc(x.cos() if is_hot(m, x) else x.sin()), fc=linear())
    sharded = graphshard.compile(model, POLICY)
    for _ in range(2):  # the programs of all calls below
        with sharded.no_sync():
            [sharded(X + shift).sum().backward() for shift in (9, -9)]
        [sharded(X + shift).sum().backward() for shift in (9, -9)]
    gc.collect()
    gc.disable()
    try:
        inputs = [X + shift for shift in (0, 9, -9, 9, -9)]
        held = [weakref.ref(each) for each in inputs]
        with sharded.no_sync():
            for each in inputs[:-1]:
                sharded(each).sum().backward()
        sharded(inputs[-1]).sum().backward()  # no backward is missing
        del each
        inputs.clear()
        assert not any(each() is not None for each in held)
    finally:
        gc.enable()


def test_a_way_that_another_kind_of_trace_needs():
    def forward(m, x):
        y = m.fc(x)
        if y.max() > 9:
            y = y + m.fc(y)  # only skips
        if not torch.isfinite(y).all():  # ordinary numbers agree
            y = y.nan_to_num(0, 1, -1) * random.random()
            return m.fc(y).sin() if y.mean() > 0 else m.fc(y.exp()).cos()
        return m.fc(y).sin() if y.mean() > 0 else m.fc(y).exp()

    model = Net(forward, fc=linear())
    model.fc.weight.data.copy_(torch.eye(4))
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    odd = torch.full((6, 4), -4.0)
    odd[0, 0] = -torch.inf
    for x in (X.abs(), odd, -X.abs(), odd + 9, X.abs(), odd):
        losses = []
        for each in (model, sharded):
            random.seed(1)
            with torch.no_grad():
                losses.append(each(x))
        assert torch.equal(*losses)


def test_a_loop_until_values_allow_ends():
    def forward(m, x):
        while m.fc(x).norm() > 0.5:
            x = x * 0.3
        return m.fc(x).square()

    model = Net(forward, fc=nn.Linear(4, 4, bias=False))
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    for scale in (1.0, 0.1, 2.0, 1.0):
        step(model, sharded, X * scale)


def test_questions_inside_of_ways_and_answers_of_inputs():
    def forward(m, x, mask):
        y = m.fc(x)
        if y.max() > 1:
            y = y * mask if mask.any() else m.fc(y)
            if y.min() < -1:
                return y.tanh()
        return y.sin()

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    ones = torch.ones(6, 4)
    for scale, mask in itertools.product((0.1, 1, 3, 30, 0.1), (ones, ones * 0)):
        step(model, sharded, X * scale, mask)


def test_sizes_that_change_and_their_guesses():
    def forward(m, x):
        y = m.fc(x)
        return y.sum(0) if y.sum() > 0 else y.sin().mean(0)

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    for rows, sign in itertools.product((6, 5, 4, 3), (1, -1)):
        step(model, sharded, X[:rows] * sign)


def test_numbers_that_are_read_in_another_order_than_asked_about():
    def forward(m, x):
        y = m.fc(x)
        first, second = y[0].sum().item(), y[1].sum().item()
        y = y.sin() if second > 0 else y * 2
        return y.exp() if first > 0 else m.fc(y)

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    for one, other in ((9, 9), (-9, -9), (9, 9), (-9, 9), (9, -9), (-9, -9)):
        x = X.clone()
        x[0] += one
        x[1] += other
        step(model, sharded, x)
    assert guesses(sharded.program) == [0, 1]


def test_questions_about_sizes_whose_tensor_an_answer_leaves_unused():
    def forward(m, x):
        y = m.fc(x)
        rows = (y[:, 0] > 0).nonzero()[:, 0]
        return y if rows.numel() == 3 else y[rows]

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    first = model.fc(X)[:, 0].sort().values
    for place in (1, 3, 4, 3):
        model.fc.bias.data[0] -= first[place - 1 : place + 1].mean()
        sharded.fc.bias.data[0] -= first[place - 1 : place + 1].mean()
        step(model, sharded, X)
        first = model.fc(X)[:, 0].sort().values
    assert len(sharded.programs) == 2


@pytest.mark.parametrize(
    ("asks", "values"),
    [
        (lambda v: v > 0, (1.0, -1.0, torch.nan)),
        (lambda v: not v <= 0, (1.0, -1.0, torch.nan)),
        (lambda v: v > 2 * v, (1.0, -1.0, -torch.inf)),
        (lambda v: v > 3 or v == torch.inf, (1.0, 4.0, torch.inf, torch.nan)),
    ],
)
def test_conditions_on_nan_and_infinity(asks, values):
    def forward(m, x):
        v = x.mean().item()
        y = m.fc(x.nan_to_num(0, 1, -1))
        way = y.sin() if asks(v) else y.cos().exp()
        return way if v <= 0 else way * 2

    # The mean is of what the layer gives, so that inputs alone do not answer.
    model = Net(lambda m, x: forward(m, m.id(x)), fc=linear(), id=nn.LayerNorm(4))
    model.id.weight.data.zero_()
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    for value in values:
        for each in (model, sharded):
            each.id.bias.data.fill_(value)
        step(model, sharded, X)


@pytest.mark.parametrize(
    "asks", [lambda v: v != v, lambda v: v - v == 0, lambda v: v == v + 1, lambda v: v * 0 == 0]
)
def test_what_algebra_would_make_a_constant_is_refused(asks):
    def forward(m, x):
        return m.fc(x).sin() if asks(m.fc(x).mean().item()) else m.fc(x).cos()

    with pytest.raises(CaptureError, match=r"(?s)NaN, infinity and rounding.*test_guesses"):
        graphshard.compile(Net(forward, fc=linear()), POLICY, example_inputs=(X,))


def test_the_dump_and_the_plan_say_what_is_guessed():
    model = Net(lambda m, x: m.fc(x.cos() if is_hot(m, x) else x.sin()), fc=linear())
    sharded = graphshard.compile(model, POLICY, example_inputs=(X.to("meta"),))
    (note,) = [note for note in sharded.program.notes if "assumes that" in note]
    assert note.startswith("assumes that the tensor is ")
    assert note.endswith("; a call in which that is not so runs again")
    assert f"note: {note}" in full_text(sharded.program)
    assert [text for text in sharded.plan.warnings if note in text]


def test_checks_come_after_the_guesses_they_may_depend_on():
    model = Net(models.asserts_if_hot, fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), POLICY)
    for sign in (1, -1, 1):
        step(model, sharded, X * sign * 20)
    for program in sharded.programs:
        places = [n.kwargs.get("guess", 99) for n in program.nodes() if n.target is check_sizes]
        assert places == sorted(places)


def test_more_answers_than_there_may_be_programs(monkeypatch):
    monkeypatch.setattr(captured, "MOST_ANSWERS", 2)

    def forward(m, x):
        y = m.fc(x)
        for row in y:
            y = y * 2 if row.sum() > 0 else y.sin()
        return y

    sharded = graphshard.compile(Net(forward, fc=linear()), POLICY)
    with pytest.raises(CaptureError, match=r"2 programs.*the tensor is (true|false), at .*forward"):
        [sharded(X * sign) for sign in (1, -1, 1)]


def test_an_answer_that_changes_from_run_to_run(monkeypatch):
    class Flips:
        turns = itertools.cycle((1.0, -1.0, -1.0, 1.0))

    @torch.library.custom_op("graphshard_tests::flips", mutates_args=())
    def flips(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, next(Flips.turns))

    flips.register_fake(torch.empty_like)

    def forward(m, x):
        y = m.fc(x)
        z = flips(y.detach())
        if z.sum() > 0:
            y = y.sin() if z.min() > 0 else y * 3
        return y if z.max() > 0 else m.fc(y)

    sharded = graphshard.compile(Net(forward, fc=linear()), POLICY)
    with pytest.raises(CaptureError, match="not the same when the same forward runs again"):
        [sharded(X) for _ in range(4)]


def test_a_backward_that_decides_is_refused():
    class Decides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 if grad.sum() > 0 else grad

    model = Net(lambda m, x: Decides.apply(m.fc(x)), fc=linear())
    with pytest.raises(CaptureError, match=r"(?s)(backward decides|control flow).*in backward"):
        graphshard.compile(model, POLICY, example_inputs=(X,))


def test_a_counter_that_only_some_answers_compute_with_is_refused():
    def forward(m, x):
        m.calls += 1
        y = m.fc(x)
        return m.fc(y) * m.calls if y[0, 0] > 0 else y.sin()

    model = Net(forward, fc=linear())
    model.calls = 0
    sharded = graphshard.compile(model, POLICY)
    sign = model.fc(X)[0, 0].sign().item()
    sharded.fc.bias.data.zero_()
    with pytest.raises(CaptureError, match=r"assigns calls \(at .*m\.calls \+= 1\).*a buffer"):
        [sharded(X * each * sign) for each in (-1, -1, 1)]
