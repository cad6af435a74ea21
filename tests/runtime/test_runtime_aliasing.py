"""Inputs, outputs and buffers that are each other, views of each other, or written by forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_tensors import full_grads
from torch import Tensor, nn

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import GraphshardError
from graphshard.program.cut import cut
from graphshard.program.program import Program


class Returns(nn.Module):
    """Returns what `function(self, x)` gives; has a parameter and a buffer."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.arange(4.0))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def same_twice(module: Any, x: Tensor) -> Any:
    y = module.linear(x)
    return y, y


def view_of_an_output(module: Any, x: Tensor) -> Any:
    y = module.linear(x)
    return y, y.t(), y[0]


def the_input(module: Any, x: Tensor) -> Any:
    return module.linear(x), x


def a_view_of_the_input(module: Any, x: Tensor) -> Any:
    return module.linear(x), x.t()


def the_weight(module: Any, x: Tensor) -> Any:
    return module.linear(x), module.linear.weight


def a_view_of_the_weight(module: Any, x: Tensor) -> Any:
    return module.linear(x), module.linear.weight.t() * 1.0, module.linear.weight[1]


def the_buffer(module: Any, x: Tensor) -> Any:
    return module.linear(x) * module.state, module.state


def buffer_written(module: Any, x: Tensor) -> Any:
    before = module.state.clone()
    y = module.linear(x) * before
    module.state.add_(1.0)
    return y * module.state, before, module.state


def input_kept(module: Any, x: Tensor) -> Any:
    return (module.linear(x) * x).exp()


FUNCTIONS = [
    same_twice,
    view_of_an_output,
    the_input,
    a_view_of_the_input,
    the_weight,
    a_view_of_the_weight,
    the_buffer,
    buffer_written,
    input_kept,
]
STRATEGIES = ["FULL_SHARD", "NO_SHARD"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_same_as_eager(
    function: Callable[[Any, Tensor], Any], input_grad: bool, strategy: str
) -> None:
    torch.manual_seed(0)
    model = Returns(function)
    policy = graphshard.BlockPolicy({nn.Linear}, strategy=strategy)
    sharded = graphshard.compile(model, policy, check=True)
    weights = [torch.randn(4, 4) for _ in range(3)]
    for used in ((0, 1, 2), (0,), (1,)):
        results = []
        for module in (sharded, model):
            module.zero_grad()
            x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_(input_grad)
            out = module(x)
            outs = out if isinstance(out, tuple) else (out,)
            terms = [
                (o * w[: len(o)] if o.ndim > 1 else o * w[0]).sum()
                for i, (o, w) in enumerate(zip(outs, weights, strict=False))
                if i in used and o.requires_grad
            ]
            if terms:
                sum(terms[1:], terms[0]).backward()
            results.append((outs, x.grad, full_grads(module)))
        (mine, my_x, my_grads), (theirs, their_x, their_grads) = results
        for a, b in zip(mine, theirs, strict=True):
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(my_x, their_x)
        assert my_grads.keys() == their_grads.keys()
        torch.testing.assert_close(my_grads, their_grads)
        assert torch.equal(sharded.get_buffer("state"), model.state)


def test_inputs_written_in_place() -> None:
    def write(module: Any, x: Tensor) -> Tensor:
        y = module.linear(x.clone())
        x.mul_(2.0)
        return y * x

    model = Returns(write)
    sharded = graphshard.compile(model, graphshard.BlockPolicy({nn.Linear}))
    mine, theirs = torch.ones(4, 4), torch.ones(4, 4)
    sharded(mine).sum().backward()
    model(theirs).sum().backward()
    assert torch.equal(mine, theirs)
    torch.testing.assert_close(full_grads(sharded), full_grads(model))


# -- the cut itself -------------------------------------------------------------------------------


def captured() -> Program:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return capture(model, (torch.randn(5, 4),)).program


def test_what_crosses_is_what_backward_reads() -> None:
    halves = cut(captured())
    assert halves.backward is not None
    crossing = [c.name for c in halves.crossings]
    assert {c.name for c in halves.crossings if not c.tensor} == {"p_1_weight"}
    placeholders = [n for n in halves.backward.nodes if n.op == "placeholder"]
    assert {n.name for n in placeholders} == {*crossing, "tangent_0"}
    assert all(n.users for n in placeholders)
    outputs, mutations, tensors, others = halves.forward.output_node().args[0]
    assert [len(outputs), len(mutations), len(tensors), len(others)] == [1, 3, len(crossing) - 1, 1]


def test_what_a_mutation_overwrites_is_kept_as_a_copy() -> None:
    """Recomputing in backward may read a buffer as it was before forward wrote it."""
    program = capture(Returns(buffer_written), (torch.randn(4, 4),)).program
    (state,) = [b.node for b in program.buffers]
    (before,) = [n for n in state.users if n.target is torch.ops.aten.clone.default]
    before.replace_all_uses_with(state)
    program.graph.erase_node(before)
    halves = cut(program)
    outputs, _, tensors, _ = halves.forward.output_node().args[0]
    kept = dict(zip([c.name for c in halves.crossings if c.tensor], tensors, strict=True))
    assert kept["b_state"].target is torch.ops.aten.clone.default
    assert outputs[1].target is torch.ops.aten.clone.default


def test_forward_cannot_read_backward() -> None:
    program = captured()
    first = next(iter(program.nodes("backward")))
    next(reversed(list(program.nodes("forward")))).args = (first,)
    with pytest.raises(GraphshardError, match=f"reads backward's {first.name}"):
        cut(program)
