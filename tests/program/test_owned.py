"""Which gradients an all_reduce may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from graphshard.cost.memory import BUFFERS, buffers_of
from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.packing import reduced_in_place
from graphshard.program.program import Program

WIDE = 256  # a weight of 256 KiB


class Layer(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).sum()


def program_of(
    forward: Callable[[Any, Tensor], Tensor], strategy: str = "NO_SHARD", **options: Any
) -> Program:
    mesh = (2, 2) if strategy.startswith("HYBRID") else (4,)
    policy = graphshard.BlockPolicy(Layer, strategy=strategy)
    plan = graphshard.plan(
        Layer(forward),
        policy,
        mesh_shape=mesh,
        example_inputs=(torch.zeros(3, WIDE, requires_grad=True),),
        **options,
    )
    assert plan.program is not None
    return plan.program


def in_place(program: Program, backend: str = "nccl") -> set[str]:
    """The parameters whose gradients are averaged where they lie."""
    return {
        params_of(node)[index]
        for node in program.nodes()
        if node.target is ops.all_reduce
        for index in reduced_in_place(node, backend)
    }


def plain(layer: Any, x: Tensor) -> Tensor:
    return layer.b(layer.a(x))


def test_large_gradients_of_their_own() -> None:
    program = program_of(plain)
    assert in_place(program) == {"a.weight", "b.weight"}  # biases travel together
    assert in_place(program, "gloo") == set()


def test_shards_that_another_reduce_returned() -> None:
    assert in_place(program_of(plain, "HYBRID_SHARD")) == {"a.weight", "b.weight"}


def the_same_gradient(layer: Any, x: Tensor) -> Tensor:
    return (layer.a.weight + layer.b.weight) * x.sum()


def test_a_gradient_of_two_parameters_is_copied() -> None:
    assert in_place(program_of(the_same_gradient)) == set()


def test_compiled_regions_may_return_one_tensor_for_two_gradients() -> None:
    assert in_place(program_of(plain, backend="inductor")) == set()


def test_predicted_copies_are_those_of_the_others() -> None:
    program = program_of(plain)
    (reduce,) = (node for node in program.nodes() if node.target is ops.all_reduce)
    whole = sum(operand.meta["val"].nbytes for operand in operands_of(reduce))
    for backend, copied in (("nccl", 2 * WIDE * 4), ("gloo", whole)):
        at_launch = [s for s in buffers_of(program, backend) if s.kind == BUFFERS]
        assert [s.size for s in at_launch if s.first is reduce] == [copied]
