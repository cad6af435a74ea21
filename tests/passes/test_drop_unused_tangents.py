"""Backward specialised to outputs that got no gradient, against zeros for those gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import toy_programs as toys
from torch import fx, nn
from toy_programs import BATCH, VOCAB, WIDTH, Toy, aten

from graphshard.capture.entry import capture
from graphshard.errors import PassError
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.planner import make_plan
from graphshard.policy.units import BlockPolicy, Policy
from graphshard.program import ops
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.verify.rules import verify


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Many(nn.Module):
    """Outputs after the first block, from a side branch, a slice, a sum with a scalar, the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first, self.side, self.last = Block(), Block(), Block()

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> Any:
        x = self.first(self.embed(ids)) * scale
        side = self.side(x).t()
        joined = torch.cat([x, side.t()], dim=1)
        y = self.last(x)
        return x, side, joined, joined[:, 1:3].sum(), y.t()


def finished(policy: Policy) -> tuple[Program, Program, Any]:
    """The captured and the finished program of `Many`, and the plan."""
    model = Many()
    scale = torch.randn(WIDTH, requires_grad=True)
    captured = capture(model, (torch.zeros(BATCH, dtype=torch.long), scale)).program
    program = captured.copy()
    plan = make_plan(model, policy, world_size=2)
    run_passes(program, plan, default_passes(policy))
    return captured, program, plan


def sample(val: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if val.dtype.is_floating_point:
        return torch.randn(tuple(val.shape), generator=generator).as_strided(
            val.shape, val.stride()
        )
    return torch.randint(VOCAB, tuple(val.shape), generator=generator)


def assert_as_if_zero(captured: Program, program: Program, plan: Any, unused: set[int]) -> None:
    """Like `toys.assert_same_values`, unused tangents being NaN here and zero in `captured`."""
    generator = torch.Generator().manual_seed(0)
    tangents = [o.tangent for o in captured.outputs if o.tangent is not None]
    undefined = {captured.outputs[i].tangent for i in unused}
    params = {p.node: p.fqn for p in captured.params}
    full: dict[str, torch.Tensor] = {}
    zeroed, poisoned = [], []
    for node in captured.graph.nodes:
        if node.op != "placeholder":
            continue
        value = sample(node.meta["val"], generator)
        if node in params:
            full[params[node]] = value
            continue
        zeroed.append(value.zero_() if node in undefined else value)
        poisoned.append(torch.full_like(value, float("nan")) if node in undefined else value)
    assert tangents
    alone = fx.Interpreter(fx.GraphModule(nn.Module(), captured.graph))
    expected = alone.run(*full.values(), *zeroed)
    for rank in range(plan.world_size):
        shards = [toys.shard(value, plan, name, rank) for name, value in full.items()]
        actual = toys.OneRank(program, plan, full, rank).run(*shards, *poisoned)
        for wanted, found in zip(expected[0], actual[0], strict=True):
            assert torch.equal(wanted, found)
        for param, wanted, found in zip(captured.params, expected[2], actual[2], strict=True):
            if found is None:
                assert wanted is None or not wanted.any(), param.fqn
            else:
                torch.testing.assert_close(found, toys.shard(wanted, plan, param.fqn, rank))
        for wanted, found in zip(expected[3], actual[3], strict=True):
            if found is None:
                assert wanted is None or not wanted.any()
            else:
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "policy",
    [
        BlockPolicy({Block}),
        pytest.param(BlockPolicy({Block}, strategy="SHARD_GRAD_OP"), marks=pytest.mark.slow),
        pytest.param(BlockPolicy({Block}, strategy="NO_SHARD"), marks=pytest.mark.slow),
        BlockPolicy({nn.Embedding}, reshard_root=True),  # all blocks in one unit
    ],
    ids=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "one unit"],
)
def test_any_outputs_without_gradients(policy: Policy) -> None:
    captured, whole, plan = finished(policy)
    outputs = range(len(whole.outputs))
    for count in range(len(outputs) + 1):
        for unused in combinations(outputs, count):
            program = whole.copy()
            DropUnusedTangents(frozenset(unused)).apply(program, plan)
            verify(program, plan, after="drop_unused_tangents")
            assert_as_if_zero(captured, program, plan, set(unused))
            same_forward = [n.name for n in program.nodes(FORWARD)] == [
                n.name for n in whole.nodes(FORWARD)
            ]
            assert same_forward


def communication(program: Program) -> list[str]:
    return [
        f"{event.op} {event.unit}"
        for event in program.schedule()
        if event.op not in ("compute", "wait") and event.phase != FORWARD
    ]


def test_what_nobody_needs_is_not_communicated() -> None:
    _, program, plan = finished(BlockPolicy({Block}, merge_below=0, reshard_after_forward=True))
    DropUnusedTangents(frozenset({1, 2, 3, 4})).apply(program, plan)
    assert communication(program) == [
        "all_gather first",
        "free first",
        "reduce_scatter first",
        "reduce_scatter ",
    ]


def test_a_unit_communicates_only_the_parameters_still_needed() -> None:
    _, program, plan = finished(BlockPolicy({nn.Embedding}, reshard_root=True))
    DropUnusedTangents(frozenset({1, 2, 3, 4})).apply(program, plan)
    for node in program.nodes(BACKWARD):
        if ops.is_collective(node) and node.kwargs["unit"] == "":
            assert {name.partition(".")[0] for name in node.kwargs["params"]} == {"first"}


def test_no_gradient_at_all() -> None:
    _, program, plan = finished(BlockPolicy({Block}, merge_below=0))
    DropUnusedTangents(frozenset(range(5))).apply(program, plan)
    assert communication(program) == ["free last"]  # since forward
    assert program.results().grads == [None] * len(program.params)
    assert program.results().input_grads == [None, None]


def test_kept_gathers_are_still_freed() -> None:
    _, program, plan = finished(BlockPolicy({Block}, strategy="SHARD_GRAD_OP", merge_below=0))
    DropUnusedTangents(frozenset(range(5))).apply(program, plan)
    assert communication(program) == ["free last", "free side", "free first"]


def two_outputs(join: Callable[[Toy, fx.Node, fx.Node], fx.Node]) -> Program:
    """Backward joins the gradients of two outputs of an embedding in some way."""
    toy = Toy({"embed.weight": (VOCAB, WIDTH)})
    toy.tangent(BATCH, WIDTH)
    toy.tangent(BATCH, WIDTH)
    x = toy.embedding("embed.weight")
    toy.tape.append(lambda gy: join(toy, gy, toy.tangents[1]))
    return toy.finish(x, extra=(toy.op(aten.cos.default, x),))


def dropped(program: Program, *unused: int) -> Program:
    plan = toys.make_toy_plan(program, ("",))
    run_passes(program, plan, default_passes(plan.policy))
    DropUnusedTangents(frozenset(unused)).apply(program, plan)
    verify(program, plan, after="drop_unused_tangents")
    return program


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.nodes("backward") if ops.is_compute(n)]


def test_a_sum_with_a_zero_is_the_other_summand() -> None:
    program = dropped(two_outputs(lambda toy, a, b: toy.op(aten.add.Tensor, a, b)), 0)
    assert targets(program) == [aten.embedding_dense_backward.default]


def test_a_sum_in_another_layout_is_kept() -> None:
    def join(toy: Toy, a: fx.Node, b: fx.Node) -> fx.Node:
        row = toy.op(aten.expand.default, toy.op(aten.sum.dim_IntList, b, [0], True), [BATCH, -1])
        return toy.op(aten.add.Tensor, a, row)

    program = dropped(two_outputs(join), 0)
    assert aten.zeros.default in targets(program)
    assert aten.add.Tensor in targets(program)


def test_zeros_have_the_strides_of_what_they_stand_for() -> None:
    def join(toy: Toy, a: fx.Node, b: fx.Node) -> fx.Node:
        square = toy.op(aten.mm.default, toy.transpose(b), b)
        return toy.op(aten.mm.default, a, toy.transpose(square))

    program = dropped(two_outputs(join), 1)
    made = next(n for n in program.nodes() if n.target is aten.as_strided.default)
    assert made.args[1:] == ([WIDTH, WIDTH], [1, WIDTH])


def test_ops_that_only_look_at_shapes_are_not_zero() -> None:
    def join(toy: Toy, a: fx.Node, b: fx.Node) -> fx.Node:
        return toy.op(aten.mul.Tensor, a, toy.op(aten.ones_like.default, b))

    program = dropped(two_outputs(join), 1)
    assert program.results().grads[0] is not None
    assert targets(program)[:3] == [aten.zeros.default, aten.ones_like.default, aten.mul.Tensor]


def test_random_numbers_are_still_drawn() -> None:
    def join(toy: Toy, a: fx.Node, b: fx.Node) -> fx.Node:
        toy.op(aten.bernoulli.p, b, 0.5)
        return toy.op(aten.add.Tensor, a, b)

    program = dropped(two_outputs(join), 1)
    assert aten.bernoulli.p in targets(program)


def test_draws_for_what_is_not_computed_are_dropped() -> None:
    """As autograd does not call the backward of an output without a gradient."""

    def join(toy: Toy, a: fx.Node, b: fx.Node) -> fx.Node:
        noise = toy.op(aten.mul.Tensor, b, toy.op(aten.rand_like.default, b))
        return toy.op(aten.add.Tensor, a, noise)

    program = dropped(two_outputs(join), 1)
    assert aten.rand_like.default not in targets(program)


def test_an_output_without_a_tangent_cannot_be_dropped() -> None:
    program, plan = toys.rewritten(toys.blocks)
    with pytest.raises(PassError, match=r"outputs \[3\] have no tangent; .* are \[0\]"):
        DropUnusedTangents(frozenset({3})).apply(program, plan)
