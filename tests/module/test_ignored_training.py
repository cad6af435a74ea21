"""Training with ignored parameters, on one rank."""

from __future__ import annotations

import copy

import pytest
import torch
from loops import same_step
from torch import Tensor, nn

import graphshard
from graphshard.errors import PolicyError


class TwoHeads(nn.Module):
    """A trunk and two heads, each an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.left(h), self.right(h)


class Casting(TwoHeads):
    """Casts what its left head takes and gives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        left = self.left(h.to(self.left.weight.dtype)) * 2
        return left.to(h.dtype), self.right(h)


@pytest.mark.parametrize("ignored", ["left", "right", r"left\.weight", "trunk"])
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_may_be_left_out_of_the_loss(ignored: str, used: int) -> None:
    torch.manual_seed(0)
    eager = TwoHeads()
    policy = graphshard.LambdaPolicy(lambda _: False, ignored=ignored)
    sharded = graphshard.compile(copy.deepcopy(eager), policy, check=True)
    x = torch.randn(2, 4)
    same_step(eager, sharded, x, objective=lambda out: out[used].square().sum())


def mixed(ignored: str, model: nn.Module) -> graphshard.ShardedModule:
    precision = graphshard.MixedPrecision(param_dtype=torch.bfloat16)
    policy = graphshard.LambdaPolicy(lambda _: False, ignored=ignored, mixed_precision=precision)
    return graphshard.compile(model, policy, example_inputs=(torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("ignored", "names"),
    [
        ("left", "'left.bias', 'left.weight'"),
        (r"left\.weight", "'left.weight'"),
        (r"left\.bias", "'left.bias'"),
    ],
)
def test_an_ignored_parameter_in_a_product_of_another_dtype_is_refused(
    ignored: str, names: str
) -> None:
    with pytest.raises(PolicyError, match=f"is {names}, which `ignored` keeps out") as refused:
        mixed(ignored, TwoHeads())
    assert "addmm.default in left takes operands in torch.bfloat16 and torch.float32" in str(
        refused.value
    )


def test_an_ignored_module_may_cast_for_itself() -> None:
    model = Casting()
    sharded = mixed("left", model)
    x = torch.randn(2, 4)
    trunk, right = (copy.deepcopy(m).bfloat16() for m in (model.trunk, model.right))
    h = trunk(x.bfloat16())
    expected = (model.left(h.float()) * 2).bfloat16(), right(h)
    for mine, theirs in zip(sharded(x), expected, strict=True):
        assert torch.equal(mine, theirs)
