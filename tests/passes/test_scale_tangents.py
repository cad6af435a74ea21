"""scale_tangents: where tangents are divided, what sums, what is multiplied back or refused."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_programs import (
    UNITS,
    Toy,
    assert_same_values,
    aten,
    blocks,
    gathering_at_need,
    make_toy_plan,
    odd_params,
    rewritten,
)

import graphshard
from graphshard import BlockPolicy, LambdaPolicy, MixedPrecision, ops
from graphshard.errors import PassError, PolicyError
from graphshard.passes.scale_tangents import ScaleTangents
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy import Policy
from graphshard.program.collective import Collective
from graphshard.program.gradient_scales import GradientScales
from graphshard.program.program import SCALE, Program
from graphshard.program.text import full_text
from graphshard.runtime.fingerprint import Fingerprint

SUM = Policy(reduce_op="sum")


def operators(program: Program) -> list[tuple[str, str]]:
    """The group and operator of each reduce."""
    reduces = [Collective.of(node) for node in program.nodes() if node.target in ops.REDUCES]
    return [(reduce.group, reduce.reduce_op) for reduce in reduces]


def factors(program: Program) -> list[Fraction]:
    return [node.meta[SCALE] for node in program.nodes() if SCALE in node.meta]


# -- programs built by hand ---------------------------------------------------------------------


@pytest.mark.parametrize("build", UNITS)
@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        ({}, (4,)),
        ({"strategy": "NO_SHARD"}, (4,)),
        ({"strategy": "HYBRID_SHARD"}, (2, 4)),
        ({"all_reduce_below": 1 << 30}, (4,)),
        ({"schedule": "overlap", "hardware": "h100-sxm"}, (8,)),
    ],
)
def test_ranks_with_equal_gradients_return_them(
    build: Callable[[], Program], fields: dict[str, Any], mesh: tuple[int, ...]
) -> None:
    program, plan = rewritten(build, Policy(reduce_op="sum", **fields), mesh=mesh)
    assert_same_values(build(), program, plan)
    assert factors(program) == [Fraction(1, plan.world_size)]
    assert {op for _, op in operators(program)} == {"sum"}


def test_dump(golden: Any) -> None:
    program, plan = rewritten(odd_params, SUM)
    golden("full_sum.txt", full_text(program))
    assert "reduce_op='sum'" in str(plan)
    assert plan.to_dict()["policy"]["reduce_op"] == "sum"
    assert "bytes by sum, 2 params" in str(program)
    lines = Fingerprint.of(program.graph, plan).lines
    assert any("backward reduce_scatter by sum of (root)" in line for line in lines)


def test_averages_are_the_default() -> None:
    program, plan = rewritten(blocks)
    assert {op for _, op in operators(program)} == {"avg"}
    assert "reduce_op" not in full_text(program) + str(plan)


@pytest.mark.parametrize(("world_size", "grad"), [(1, True), (4, False)])
def test_nothing_to_sum(world_size: int, grad: bool) -> None:
    program, _ = rewritten(blocks, SUM, world_size=world_size, grad=grad)
    assert factors(program) == []
    assert {op for _, op in operators(program)} <= {"avg"}


def test_over_replicas_the_factor_counts_all_ranks() -> None:
    program, _ = rewritten(blocks, Policy(reduce_op="sum", strategy="HYBRID_SHARD"), mesh=(2, 4))
    assert factors(program) == [Fraction(1, 8)]
    assert set(operators(program)) == {("shard", "sum"), ("replicate", "sum")}


def test_the_callers_average_over_replicas_stays_one() -> None:
    policy = gathering_at_need(Policy(reduce_op="sum", strategy="HYBRID_SHARD"))
    program = odd_params()
    plan = make_toy_plan(program, UNITS[odd_params], policy, mesh=(2, 4))
    plan.replica_all_reduce = "mine"
    run_passes(program, plan, default_passes(policy))
    assert factors(program) == [Fraction(1, 4)]
    assert set(operators(program)) == {("shard", "sum"), ("replicate", "avg")}


def test_twice_is_refused() -> None:
    program, plan = rewritten(blocks, SUM)
    with pytest.raises(PassError, match="tangents are scaled already; run the pass once"):
        ScaleTangents().apply(program, plan)


def with_constant(target: Any, *others: Any) -> Program:
    """A program whose gradient of the last weight passes through `target`."""
    toy = Toy({"embed.weight": (10, 6), "head.weight": (10, 6)})
    toy.tangent(4, 10)
    x = toy.embedding("embed.weight")
    y = toy.linear(x, "head.weight")
    odd = lambda gy: toy.op(target, gy, *others)  # noqa: E731
    toy.tape.append(odd)
    return toy.finish(y)


@pytest.mark.parametrize(
    ("target", "others", "text"),
    [
        (aten.clamp.default, (-1.0, 1.0), "aten.clamp.default in head is not known to be linear"),
        (aten.add.Tensor, (1.0,), "aten.add.Tensor in head is not known to be linear"),
        (aten.view.dtype, (torch.float32,), "is not known to be linear in the gradient"),
        (aten.constant_pad_nd.default, ([0, 0], 1.0), "is not known to be linear"),
    ],
)
def test_a_backward_that_is_not_linear_is_refused(target: Any, others: Any, text: Any) -> None:
    with pytest.raises(PolicyError, match=f'pass scale_tangents: reduce_op="sum" needs.*{text}'):
        run(with_constant(target, *others))


def run(program: Program, world_size: int = 4) -> ShardingPlan:
    plan = make_toy_plan(program, ("",), SUM, world_size)
    run_passes(program, plan, default_passes(SUM))
    return plan


@pytest.mark.parametrize(
    ("target", "others"),
    [
        (aten.neg.default, ()),
        (aten.mul.Tensor, (3.0,)),
        (aten.add.Tensor, (0,)),
        (aten.clone.default, ()),
        (aten.constant_pad_nd.default, ([0, 0], 0.0)),
    ],
)
def test_linear_operators_are_taken(target: Any, others: Any) -> None:
    program = with_constant(target, *others)
    plan = run(program)
    assert set(GradientScales.find(program, plan).of.values()) == {Fraction(1, 4), 1}


# -- captured programs --------------------------------------------------------------------------


def _cube() -> Tensor:
    return torch.ones(4, 4, 4)


class Step(torch.autograd.Function):
    """An identity whose backward is what `how` makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = {
            "clipped": lambda: grad.clamp(-1e-3, 1e-3),
            "squared": lambda: grad * grad,
            "shifted": lambda: grad + torch.ones_like(grad),
            "masked": lambda: torch.where(grad > 0, grad, torch.zeros_like(grad)),
            "normed": lambda: grad / grad.norm(),
            "rounded": lambda: torch.div(grad, 3.0, rounding_mode="floor"),
            "constant": lambda: torch.ones_like(grad),
            "halved": lambda: grad / 2 + grad.flip(0).flip(0) * 0.5,
            "zero": lambda: torch.zeros_like(grad),
            "copied": lambda: torch.empty_like(grad).copy_(grad),
            "stretched": lambda: torch.nn.functional.bilinear(grad, grad.new_ones(2, 4), _cube()),
        }
        return made[ctx.how](), None


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        h = Step.apply(h, self.how) if self.how else h
        return self.left(h), self.right(h).sum(), x


def planned(
    model: nn.Module,
    world_size: int = 4,
    *,
    needs_grad: bool = False,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Program:
    policy = LambdaPolicy(lambda _: False, reduce_op="sum", **fields)
    x = torch.zeros(2, 4, dtype=dtype, requires_grad=needs_grad)
    plan = graphshard.plan(model, policy, world_size=world_size, example_inputs=(x,))
    assert plan.program is not None
    return plan.program


@pytest.mark.parametrize("how", ["clipped", "squared", "shifted", "masked", "normed", "rounded"])
def test_a_function_whose_backward_is_not_linear_is_refused(how: str) -> None:
    with pytest.raises(PolicyError, match=r'needs a backward that is linear.*use reduce_op="avg"'):
        planned(Model(how))


def test_a_gradient_without_a_tangent_is_refused() -> None:
    """No division of tangents would make its sum an average."""
    with pytest.raises(PolicyError, match=r"gradient of 'trunk.\w+' comes out multiplied by 4"):
        planned(Model("constant"))


@pytest.mark.parametrize("how", ["halved", "zero", "copied", "stretched"])
def test_linear_functions_are_taken(how: str) -> None:
    assert {op for _, op in operators(planned(Model(how)))} == {"sum"}


def test_one_node_for_each_tangent_and_each_gradient_multiplied_back() -> None:
    program = planned(Model(), ignored="left", needs_grad=True)
    # The gradients of two outputs that compute reads, and of the input that is an output as well.
    assert sorted(factors(program)) == [Fraction(1, 4)] * 3 + [Fraction(4)] * 3
    results = program.results()
    returned = dict(zip([p.fqn for p in program.params], results.grads, strict=True))
    for name, grad in returned.items():
        assert (SCALE in grad.meta) == name.startswith("left."), name
    assert [SCALE in grad.meta for grad in results.input_grads] == [True]


def test_a_tangent_that_is_returned_stays_as_it_is() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), y * 1

    policy = LambdaPolicy(lambda _: False, reduce_op="sum")
    x, y = torch.zeros(2, 4), torch.zeros(2, 4, requires_grad=True)
    plan = graphshard.plan(Passes(), policy, world_size=4, example_inputs=(x, y))
    assert plan.program is not None
    tangents = [entry.tangent for entry in plan.program.outputs]
    (_, grad) = plan.program.results().input_grads
    assert grad is tangents[1] or SCALE in grad.meta
    assert min(factors(plan.program)) == Fraction(1, 4)


def test_frozen_parameters_leave_nothing_to_scale() -> None:
    model = Model().requires_grad_(False)
    program = planned(model, needs_grad=True)
    assert factors(program) == []
    assert program.results().input_grads[0] is not None


# -- dtypes and numbers of ranks ----------------------------------------------------------------


def test_float16_is_refused() -> None:
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    with pytest.raises(PolicyError, match=r"those in torch.float16 underflow, as %\w+ may"):
        planned(Model(), mixed_precision=half)
    with pytest.raises(PolicyError, match="reduces of float16 add up in any case"):
        planned(Model().half(), dtype=torch.float16)


def test_ranks_that_are_no_power_of_two() -> None:
    assert set(factors(planned(Model(), 6))) == {Fraction(1, 6)}
    with pytest.raises(PolicyError, match=r"'args\[0\]', which no rank reduces.*6 is no power"):
        planned(Model(), 6, needs_grad=True)
    with pytest.raises(PolicyError, match=r"gradient of 'left.weight'.*6 is no power of two"):
        planned(Model(), 6, ignored="left")
    with pytest.raises(PolicyError, match=r"in torch.bfloat16 as it divides it by 6 ranks"):
        planned(Model().bfloat16(), 6, dtype=torch.bfloat16)
    assert set(factors(planned(Model().bfloat16(), 8, dtype=torch.bfloat16))) == {Fraction(1, 8)}


# -- simulation ---------------------------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(256, 256)
        self.head = nn.Linear(256, 50_000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_simulation_counts_the_quotients() -> None:
    def plan(op: str) -> ShardingPlan:
        with torch.device("meta"):
            model = Logits()
        policy = BlockPolicy({nn.Linear}, reduce_op=op)
        return graphshard.plan(model, policy, world_size=8, example_inputs=(torch.ones(512, 256),))

    averaged, summed = (graphshard.simulate(plan(op), hardware="h100-sxm") for op in ("avg", "sum"))
    read_and_written = 2 * 4 * 512 * 50_000
    seconds = summed.step_seconds - averaged.step_seconds
    assert seconds > 0.5 * read_and_written / 3.35e12
