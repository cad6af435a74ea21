"""Symbolic sizes: what cannot be dynamic, and passes that would decide by one."""

from __future__ import annotations

import pytest
import torch
from capture_models import IDS, Asks, Outputs, asks
from models import CASES

import graphshard
from graphshard.errors import PassError, PolicyError


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
