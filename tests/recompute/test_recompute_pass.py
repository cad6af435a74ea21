"""Recomputed regions: fewer values saved, the same numbers, the same random stream."""

from __future__ import annotations

import pytest
import torch
from program_runner import run_captured
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from graphshard.capture.entry import capture
from graphshard.passes.recompute import Recompute
from graphshard.planning.planner import make_plan
from graphshard.policy.units import BlockPolicy
from graphshard.program.program import BACKWARD, FORWARD


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.softmax(self.drop(self.up(self.norm(x))), -1)))


class Stack(nn.Module):
    def __init__(self, p=0.2, checkpointed=False, times=1):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(8, p) for _ in range(3)])
        self.checkpointed = checkpointed
        self.times = times

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            for _ in range(self.times):
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def crossing(program) -> list[fx.Node]:
    """Forward results that backward reads: what is saved."""
    found = {
        source: None
        for node in program.nodes(BACKWARD)
        for source in node.all_input_nodes
        if source.op == "call_function" and source.meta["phase"] == FORWARD
    }
    return list(found)


def plan_of(model):
    return make_plan(model, BlockPolicy({Block}), world_size=2)


def both_ways(model, units):
    captured = capture(model, (X,))
    before = len(crossing(captured.program))
    torch.manual_seed(3)
    plain = run_captured(captured, model, (X,), {})
    Recompute(units=units).apply(captured.program, plan_of(model))
    captured.program.graph.lint()
    torch.manual_seed(3)
    again = run_captured(captured, model, (X,), {})
    assert torch.equal(plain[0], again[0])
    for name, gradient in plain[2].items():
        assert torch.equal(gradient, again[2][name]), name
    return before, captured.program


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("times", [1, 2])
def test_units_are_recomputed_with_the_same_numbers(p, times):
    before, program = both_ways(Stack(p, times=times), units=True)
    saved = crossing(program)
    assert len(saved) < before / 2
    inside = {n.name for n in saved if n.meta["fqn"].endswith((".up", ".down", ".norm"))}
    assert not inside


def test_only_masks_of_dropout_are_kept():
    _, program = both_ways(Stack(0.2), units=True)
    kept = [n for n in crossing(program) if n.meta["fqn"].endswith(".drop")]
    assert len(kept) == 6
    assert {n.meta["val"].dtype for n in kept} == {torch.bool}


def test_regions_the_model_checkpoints_are_recomputed_without_being_asked():
    before, program = both_ways(Stack(0.2, checkpointed=True), units=False)
    assert len(crossing(program)) < before / 2


def test_nothing_happens_without_regions():
    model = Stack()
    program = capture(model, (X,)).program
    nodes = [n.name for n in program.graph.nodes]
    Recompute().apply(program, plan_of(model))
    assert [n.name for n in program.graph.nodes] == nodes


def test_a_transformer_block_saves_its_input_alone():
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu") for _ in range(2)))
    captured = capture(model, (torch.randn(5, 3, 8),))
    plan = make_plan(model, BlockPolicy({nn.TransformerEncoderLayer}), world_size=2)
    Recompute(units=True).apply(captured.program, plan)
    (saved,) = crossing(captured.program)
    assert saved.meta["fqn"].startswith("0")
    again = [n for n in captured.program.nodes(BACKWARD) if "flash_attention" in n.name]
    assert len(again) == 4  # both forwards once more, and both backwards


def test_buffers_are_not_updated_twice():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    captured = capture(model, (X,))
    plan = make_plan(model, BlockPolicy({nn.BatchNorm1d}), world_size=2)
    names = [m.name for m in captured.program.mutations]
    before = captured.program.results().mutations
    Recompute(units=True).apply(captured.program, plan)
    assert captured.program.results().mutations == before
    assert len(names) == 3
