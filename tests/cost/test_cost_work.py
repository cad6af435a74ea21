"""What a simulation computes once, whatever the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import graphshard
from graphshard.cost.op_cost import _computed, op_cost


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


def test_what_was_found_for_a_node_is_kept_with_its_copies(monkeypatch):
    program = planned().program
    assert program is not None
    costs = [op_cost(node) for node in program.nodes()]

    def none(node: Any) -> None:
        raise AssertionError(f"computed {node.format_node()}")

    monkeypatch.setattr("graphshard.cost.op_cost._computed", none)
    assert [op_cost(node) for node in program.copy().nodes()] == costs


def test_a_node_that_was_changed_costs_anew():
    program = planned().program
    assert program is not None
    node = next(n for n in program.nodes() if n.target is torch.ops.aten.relu.default)
    before = op_cost(node)
    node.meta["val"] = torch.empty(400, 16, device="meta")
    assert op_cost(node).moved > before.moved
    source = node.args[0]
    source.meta["val"] = torch.empty(400, 16, device="meta")
    assert op_cost(node) == _computed(node)


def test_a_constant_that_was_changed_costs_anew():
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node in inputs:
        node.meta["val"] = torch.empty(2, 4, 64, 16, device="meta")
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    node = graph.call_function(target, (*inputs, 0.0, False))
    node.meta["val"] = (torch.empty(2, 4, 64, 16, device="meta"),)
    whole = op_cost(node).flops
    node.args = (*inputs, 0.0, True)
    assert op_cost(node).flops == whole // 2
