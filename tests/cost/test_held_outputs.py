"""Outputs that a training loop's variables hold during the next forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphshard
from examples.benchmarks.live_bytes import LiveBytes
from graphshard import BlockPolicy
from graphshard.cost.estimate import Estimate
from graphshard.hardware.hardware import Hardware
from graphshard.program.storages import RETURNED

WIDTH, WORDS, BATCH = 64, 512, 128
LOGITS = BATCH * WORDS * 4


class Model(nn.Module):
    """Returns its loss with its logits, which are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        return logits.exp().log1p().sum(), logits


def inputs() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def estimates(hardware: str = "cpu-gloo", world: int = 1, **options: Any) -> list[Estimate]:
    """Without and with outputs held."""
    backend = Hardware.load(hardware).process_group_backend
    asked = {"example_inputs": (inputs(),), "process_group_backend": backend}
    plan = graphshard.plan(Model(), BlockPolicy({nn.Linear}), world_size=world, **asked)
    common = {"hardware": hardware, "optimizer": "none", **options}
    return [graphshard.simulate(plan, holds_outputs=held, **common) for held in (False, True)]


@pytest.mark.parametrize("held", [False, True])
def test_predicted_bytes_are_those_of_such_a_loop(held: bool) -> None:
    torch.manual_seed(0)
    sharded = graphshard.compile(Model(), BlockPolicy({nn.Linear}))
    x = inputs()
    sharded(x)[0].backward()
    sharded.zero_grad()
    live = LiveBytes()
    live.add([*sharded.parameters(), x])
    rest = live.current
    kept: list[Any] = []
    with live:
        for _ in range(3):
            results = sharded(x)
            kept[:] = results
            results[0].backward()
            sharded.zero_grad()
            del results
            if not held:
                kept.clear()
        between = live.current
        live.peak = 0
        kept[:] = sharded(x)
    found = estimates()[held]
    border = list(found.program.graph.nodes).index(found.program.first_backward())
    forward = max(p.bytes for p in found.memory.points if p.place < border)
    assert between == found.valley_bytes == rest + held * (LOGITS + 4)
    assert live.peak == forward


def test_forward_holds_the_outputs_of_two_calls() -> None:
    without, held = estimates()
    border = list(held.program.graph.nodes).index(held.program.first_backward())

    def at(found: Estimate, place: int) -> int:
        return [p for p in found.memory.points if p.place <= place][-1].bytes

    outputs = LOGITS + 4
    assert held.valley_bytes == without.valley_bytes + outputs
    assert held.memory.valley_by_category[RETURNED] == outputs
    end = len(held.program.graph.nodes) - 1
    for place in range(end):
        assert at(held, place) - at(without, place) == (outputs if place < border else 0)
    assert "outputs held until the next call returns" in str(held)
    assert "outputs held" not in str(without)
    assert [each.to_dict()["holds_outputs"] for each in (without, held)] == [False, True]


@pytest.mark.parametrize("runtime", ["graphshard", "fsdp2"])
def test_the_allocator_holds_them_too(runtime: str) -> None:
    with torch.no_grad():  # so that nothing but outputs is alive at the end
        without, held = estimates("h100-sxm", 4, runtime=runtime)
    assert without.reserved is not None
    assert held.reserved is not None
    more = held.reserved.allocated - without.reserved.allocated
    assert LOGITS <= more <= LOGITS + 512
    assert held.reserved_bytes >= without.reserved_bytes


def test_without_gradients_both_are_alive_at_the_end() -> None:
    with torch.no_grad():
        without, held = estimates()
    assert held.peak_bytes - without.peak_bytes == LOGITS + 4
