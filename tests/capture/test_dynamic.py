"""Symbolic batch sizes and lengths: one program is right for every shape it admits."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from capture_models import IDS, Asks, Outputs, asks
from loops import same_step
from models import CASES
from torch import nn

import graphshard
from graphshard.errors import CaptureError, FixedSizeError, PassError, PolicyError
from graphshard.program.text import full_text

SHAPES = [(2, 17), (3, 5), (7, 7), (2, 31), (5, 2)]


def call(case, shape, seed=0):
    torch.manual_seed(seed)
    ids = torch.randint(67, shape)
    first, second = case.batch()
    return {first: ids, second: torch.randint(67, shape)}


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "units"},
        {"offload": "activations"},
        slow({"strategy": "SHARD_GRAD_OP"}),
        slow({"backward_prefetch": "post", "forward_prefetch": 2}),
    ],
    ids=str,
)
def test_one_capture_serves_every_shape(fields):
    """Of models of transformers, with padding: test_dynamic_models.py."""
    case = CASES["gpt"]
    model = case.model()
    model.blocks = model.blocks[:1]
    dynamic = dict.fromkeys(case.batch(), IDS)
    policy = graphshard.BlockPolicy(case.blocks, **fields)
    example = call(case, (4, 11))
    sharded = graphshard.compile(model, policy, example_kwargs=example, dynamic=dynamic, check=True)
    for shape in SHAPES:
        same_step(model, sharded, **call(case, shape, seed=shape[1]))
    assert len(sharded.programs) == 1


def test_gradients_kept_by_no_sync_share_the_trace():
    model, sharded = asks()
    with sharded.no_sync():
        for shape in [(2, 3), (4, 5)]:
            x = torch.randn(*shape, 4)
            (sharded(x).sum() + 0).backward()
            model(x).sum().backward()
    x = torch.randn(3, 7, 4)
    sharded(x).sum().backward()
    model(x).sum().backward()
    for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    assert len(sharded._graphshard.programs._captures) == 1


def test_images_of_every_size_and_gradients_of_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    sharded = graphshard.compile(
        model,
        graphshard.SizePolicy(20),
        dynamic={"input": {0: "batch", 2: "height", 3: "width"}},
        check=True,
    )
    for shape in [(4, 3, 8, 8), (3, 3, 9, 7), (5, 3, 4, 8)]:
        given = torch.randn(shape)
        grads = []
        for one in (model, sharded):
            one.zero_grad()
            x = given.clone().requires_grad_()
            torch.manual_seed(2)
            one(x).square().sum().backward()
            grads.append([x.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        assert all(map(torch.equal, *grads))
    assert len(sharded.programs) == 1


@pytest.mark.parametrize("name", [slow("gpt"), "llama"])
def test_evaluation_has_one_program_for_every_shape(name):
    case = CASES[name]
    model = case.model().eval()
    first = next(iter(case.batch()))
    sharded = graphshard.compile(
        model, graphshard.BlockPolicy(case.blocks), dynamic={first: IDS}
    ).eval()
    options = {} if name == "gpt" else {"use_cache": True}
    with torch.no_grad():
        for shape in SHAPES:
            given = {first: call(case, shape)[first], **options}
            wanted, got = model(**given), sharded(**given)
            if name == "gpt":
                assert torch.equal(got, wanted)
            else:
                assert torch.equal(got.logits, wanted.logits)
                keys = zip(got.past_key_values.layers, wanted.past_key_values.layers, strict=True)
                assert all(torch.equal(a.keys, b.keys) for a, b in keys)
    assert len(sharded.programs) == 1


def test_a_broken_guard_captures_another_program_and_says_why(caplog):
    model, sharded = asks()
    programs = []
    with caplog.at_level(logging.INFO, "graphshard"):
        for shape in [(2, 4), (3, 6), (2, 8), (4, 10), (2, 5), (3, 7), (6, 4), (2, 9), (3, 4)]:
            x = torch.randn(*shape, 4)
            assert torch.equal(sharded(x), model(x)), shape
            programs.append(len(sharded.programs))
    assert programs == [1, 1, 2, 2, 3, 3, 4, 5, 5]
    said = [record.getMessage() for record in caplog.records]
    assert "batch=2, seq=8 (the last program needs a value computed from sizes alone" in said[0]
    assert "sizes: batch=2, seq=5 (the last program needs (seq % 2) == 0, at " in said[1]
    assert "if x.shape[1] % 2:" in said[1]
    assert "batch=6, seq=4 (the last program needs (seq % 2) != 0, at" in said[2]
    assert "batch=2, seq=9 (the last program needs (seq % 2) == 0" in said[3]


def test_the_dump_shows_names_and_guards(golden):
    _, sharded = asks(example_inputs=(torch.randn(3, 5, 4),))
    golden("dynamic_asks.txt", full_text(sharded.program))


def test_plan_needs_no_process_group_and_no_memory():
    with torch.device("meta"):
        model = CASES["gpt"].build()
        ids = torch.empty(1, 16, dtype=torch.long)
    plan = graphshard.plan(
        model,
        graphshard.BlockPolicy({"Block"}),
        world_size=8,
        example_inputs=(ids, ids),
        dynamic={"idx": IDS, "targets": IDS},
    )
    text = full_text(plan.program)
    assert "in_args_0 : i64[batch, seq]" in text
    assert "f32[batch, seq, 24]" in text
    assert "f32[batch*seq, 96]" in text
    assert "size seq: dim 1 of args[0], dim 1 of args[1]; at least 2" in text
    assert "s0" not in text.replace("blocks.0", "").replace("blocks_0", "")


def test_sizes_of_one_and_none_have_programs_of_their_own():
    model, sharded = asks(example_inputs=(torch.randn(1, 5, 4),))  # traced for a larger batch
    for shape, count in [((3, 5), 1), ((1, 5), 2), ((1, 7), 2), ((0, 5), 3), ((4, 5), 3)]:
        x = torch.randn(*shape, 4)
        assert torch.equal(sharded(x), model(x)), shape
        assert len(sharded.programs) == count, shape


def test_an_argument_is_dynamic_however_it_is_passed():
    model, sharded = asks()
    x, scale = torch.randn(3, 5, 4), torch.tensor(2.0)
    for _ in range(2):
        assert torch.equal(sharded(x, scale), model(x, scale))
        assert torch.equal(sharded(scale=scale, x=x), model(x, scale))
        x = torch.randn(2, 3, 4)
    assert len(sharded.programs) == 2  # another structure of the call, not another size


def test_inputs_that_are_not_contiguous_keep_their_strides():
    model, sharded = asks()
    for shape in [(2, 5), (3, 7)]:
        x = torch.randn(*shape, 4)
        assert torch.equal(sharded(x), model(x))
        assert torch.equal(sharded(x[:, :-2]), model(x[:, :-2]))
        assert torch.equal(sharded(x.transpose(0, 1).contiguous().transpose(0, 1)), model(x))
        wide = torch.randn(*shape, 8)[..., ::2]
        assert torch.equal(sharded(wide), model(wide))
    assert len(sharded.programs) == 4
    assert "f32[batch, seq, 4]" in full_text(sharded.programs[1])


@pytest.mark.parametrize("used", [("left",), ("right",), ("both",), ("left", "both")])
def test_sizes_are_returned_and_outputs_may_get_no_gradient(used):
    model = Outputs()
    sharded = graphshard.compile(
        model, graphshard.SizePolicy(1), dynamic={"batch['x']": IDS}, check=True
    )
    for shape in [(2, 3), (4, 3), (2, 9)]:
        x = torch.randn(*shape, 4)

        def objective(out, shape=shape):
            assert (out["len"], out["n"]) == (shape[1], [shape[0] * 2])
            return sum((out[name] ** 2).sum() for name in used)

        same_step(model, sharded, {"x": x}, objective=objective)
    assert len(sharded.programs) == 1


def test_backward_keeps_no_activation_for_its_size():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x).sum()

    sharded = graphshard.compile(
        Sum(), graphshard.SizePolicy(1), example_inputs=(torch.randn(3, 5, 4),), dynamic={"x": IDS}
    )
    (step,) = sharded._graphshard.programs.steps.values()
    saved = {c.name for c in step.saved if c.tensor}
    assert all("view" in name or "in_args" in name for name in saved), saved  # lin's own input
    assert {"batch", "seq"} <= {c.name for c in step.saved if not c.tensor}


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.places = nn.Parameter(torch.zeros(6, 4))

    def forward(self, x):
        return F.relu(self.lin(x) + self.places)


def test_a_model_that_fixes_a_size_is_refused_with_its_line():
    with pytest.raises(FixedSizeError) as caught:
        graphshard.plan(
            Positions(),
            graphshard.SizePolicy(1),
            example_inputs=(torch.randn(3, 6, 4),),
            dynamic={"x": IDS},
        )
    text = str(caught.value)
    assert "dim 1 of args[0] (seq) is to be dynamic, but the model fixes it to 6" in text
    assert "return F.relu(self.lin(x) + self.places)" in text
    assert isinstance(caught.value, CaptureError)
    assert caught.value.size == "seq"


class Shift(nn.Module):
    """At length 2 what is left broadcasts, so that size is fixed there and nowhere else."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = self.lin(x)
        out = torch.zeros_like(y)
        out[:, 1:] = y[:, :-1]
        return out


def test_a_size_fixed_for_some_calls_only_has_a_program_there():
    model = Shift()
    sharded = graphshard.compile(model, graphshard.SizePolicy(1), dynamic={"x": IDS})
    for shape, count in [((3, 5), 1), ((3, 2), 2), ((4, 2), 2), ((2, 8), 2), ((7, 2), 2)]:
        x = torch.randn(*shape, 4)
        assert torch.equal(sharded(x), model(x)), shape
        assert len(sharded.programs) == count, shape


# -- what cannot be dynamic -------------------------------------------------------------------


class Peeks:
    name = "peeks"

    def apply(self, program, plan):
        if program.inputs[0].node.meta["val"].shape[1] > 4:
            pass


def test_a_pass_may_not_decide_by_a_symbolic_size():
    with pytest.raises(PassError, match=r"pass peeks decided by a symbolic size \(seq > 4, at "):
        asks(example_inputs=(torch.randn(3, 5, 4),), passes=[Peeks()])


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"y": IDS}, "names 'y', which the forward of Asks does not take; its arguments are x, s"),
        ({"x": {3: "batch"}}, "names dim 3 of x, a tensor of 3 dimensions"),
        ({"x": {-4: "batch"}}, "names dim -4 of x"),
        ({"x": {0: "n", 1: "n"}}, "both dim 0 of x and dim 1 of x 'n', but in this call"),
        ({"x": {0: "n", -3: "m"}}, "gives dim 0 of x two names, 'n' and 'm'"),
        ({"x['ids']": IDS}, "is no tensor of this call; its tensors are x"),
        ({"scale": IDS}, "'scale', which in this call is a float and no tensor"),
        ({"x": {0: 4}}, "must map names of the forward's arguments"),
        ({"x": {0: "a b"}}, "a name being letters"),
        ({"x": ["batch"]}, "must map names"),
        (["x"], "must map names"),
    ],
)
def test_what_cannot_be_dynamic_is_refused(dynamic, message):
    with pytest.raises(PolicyError) as caught:
        graphshard.plan(
            Asks(),
            graphshard.SizePolicy(1),
            example_inputs=(torch.randn(3, 5, 4), 2.0),
            dynamic=dynamic,
        )
    assert message in str(caught.value)


def test_an_argument_of_tensors_must_be_named_one_by_one():
    with pytest.raises(PolicyError, match=r"holds several tensors; name one of them: batch\['x'\]"):
        graphshard.plan(
            Outputs(),
            graphshard.SizePolicy(1),
            example_inputs=({"x": torch.randn(3, 5, 4)},),
            dynamic={"batch": IDS},
        )


def test_a_call_whose_sizes_disagree_is_refused():
    case = CASES["gpt"]
    sharded = graphshard.compile(
        case.model(), graphshard.BlockPolicy(case.blocks), dynamic=dict.fromkeys(case.batch(), IDS)
    )
    wrong = {"idx": torch.zeros(2, 5, dtype=torch.long), "targets": torch.zeros(2, 6).long()}
    with pytest.raises(PolicyError, match="but in this call their sizes are 5 and 6"):
        sharded(**wrong)
