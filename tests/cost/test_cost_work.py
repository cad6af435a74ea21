"""What a simulation computes, counted: once per distinct operation, whatever the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import graphshard
from graphshard.cost.op_cost import FREE, _computed, once_per_operation, op_cost


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.sum()


def planned(layers: int = 4, world_size: int = 8) -> graphshard.ShardingPlan:
    with torch.device("meta"):
        model, x = Stack(layers), torch.empty(4, 16)
    policy = graphshard.BlockPolicy({nn.Linear})
    return graphshard.plan(model, policy, world_size=world_size, example_inputs=(x,))


class Counted:
    """`op_cost` with a memory of its own, and how often it had to compute."""

    def __init__(self) -> None:
        self.computed = 0

        def cost(node: Any) -> Any:
            self.computed += 1
            return _computed(node)

        self.of = once_per_operation("counted", cost)

    def walk(self, program: graphshard.Program) -> int:
        """How often, for all nodes of `program`."""
        before = self.computed
        for node in program.nodes():
            if not hasattr(node.target, "overloadpacket"):
                assert op_cost(node) is FREE
                continue
            assert self.of(node) == _computed(node) == op_cost(node)
        return self.computed - before


def test_layers_like_others_cost_nothing_to_look_up():
    few, many = planned(3).program, planned(9).program
    assert few is not None
    assert many is not None
    counted = Counted()
    first = counted.walk(few)
    assert 0 < first < 40
    assert counted.walk(few) == 0
    assert counted.walk(few.copy()) == 0
    assert counted.walk(many) == 0, "only more of the same"


def test_what_was_found_for_a_node_is_kept_with_its_copies(monkeypatch):
    program = planned().program
    assert program is not None
    counted = Counted()
    counted.walk(program)

    def none(node: Any) -> None:
        raise AssertionError(f"looked up {node.format_node()}")

    monkeypatch.setattr("graphshard.cost.op_cost._form_of", none)
    assert counted.walk(program.copy()) == 0


def test_a_node_that_was_changed_costs_anew():
    program = planned().program
    assert program is not None
    counted = Counted()
    node = next(n for n in program.nodes() if n.target is torch.ops.aten.relu.default)
    before = counted.of(node)
    node.meta["val"] = torch.empty(400, 16, device="meta")
    assert counted.of(node).moved > before.moved
    source = node.args[0]
    source.meta["val"] = torch.empty(400, 16, device="meta")
    assert counted.of(node) == _computed(node)


def test_a_constant_that_was_changed_costs_anew():
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node in inputs:
        node.meta["val"] = torch.empty(2, 4, 64, 16, device="meta")
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    node = graph.call_function(target, (*inputs, 0.0, False))
    node.meta["val"] = (torch.empty(2, 4, 64, 16, device="meta"),)
    counted = Counted()
    whole = counted.of(node).flops
    node.args = (*inputs, 0.0, True)
    assert counted.of(node).flops == whole // 2
