"""Memory of compiled regions: what no kernel writes, and what is computed again from less."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard.cost.estimate import Estimate
from graphshard.cost.memory import memory_of
from graphshard.errors import CostError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.storages import AT_WORK, SAVED

TOKENS, WIDTH, VOCAB = 64, 16, 4096
LOGITS = TOKENS * VOCAB  # elements


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Loss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)


class Model(nn.Module):
    """A head that is most of the memory, and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.loss = Loss()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.head(self.layers(x)), targets)


@cache
def plan(backend: str) -> ShardingPlan:
    with torch.device("meta"):
        model = Model()
        inputs = torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.int64)
    policy = graphshard.BlockPolicy(
        {Layer}, mixed_precision=graphshard.MixedPrecision(torch.bfloat16)
    )
    return graphshard.plan(model, policy, world_size=2, example_inputs=inputs, backend=backend)


def estimate(backend: str, **options) -> Estimate:
    return graphshard.simulate(plan(backend), hardware="h100-sxm", optimizer="none", **options)


def sizes(found: Estimate) -> dict[str, int]:
    """Bytes of large storages, by the node's name."""
    large = [s for s in found.memory.storages if s.size >= LOGITS and s.kind in (AT_WORK, SAVED)]
    return {storage.node.name: storage.size for storage in large}


def test_of_a_compiled_loss_only_what_others_read_is_in_memory():
    eager, compiled = sizes(estimate("eager")), sizes(estimate("inductor"))
    assert [size for size in eager.values() if size == 4 * LOGITS][:2] == [4 * LOGITS] * 2
    # The head's product, the saved probabilities, and the gradient that products of backward read.
    assert {name: size // LOGITS for name, size in compiled.items()} == {
        "mm": 2,
        "_log_softmax": 4,
        next(name for name in compiled if name.startswith("_to_copy")): 2,
    }
    assert set(compiled) < set(eager)
    assert "is in memory only where others read it" in str(estimate("inductor"))


def test_a_compiled_step_never_holds_more_than_an_eager_one():
    eager, compiled = estimate("eager"), estimate("inductor")
    assert compiled.peak_bytes < eager.peak_bytes
    assert compiled.reserved_bytes <= eager.reserved_bytes
    assert compiled.valley_bytes == eager.valley_bytes
    program = compiled.program
    one_by_one = memory_of(program, compiled.plan, optimizer="none")
    assert one_by_one.peak.bytes == eager.peak_bytes, "what a failed compilation would take"


def test_torch_compile_saves_logits_and_not_the_probabilities():
    own, fsdp2 = sizes(estimate("inductor")), sizes(estimate("inductor", runtime="fsdp2"))
    assert set(own) - set(fsdp2) == {"_log_softmax"}
    kinds = {s.node.name: s.kind for s in estimate("inductor", runtime="fsdp2").memory.storages}
    assert kinds["mm"] in (AT_WORK, SAVED)
    assert estimate("inductor", runtime="fsdp2").peak_bytes < estimate("inductor").peak_bytes


def test_a_root_that_is_left_eager_holds_what_eager_does():
    found = estimate("inductor", runtime="fsdp2", leave_eager=[""])
    assert sizes(found) == sizes(estimate("eager"))
    assert found.peak_bytes == estimate("eager").peak_bytes


def test_a_module_may_be_left_eager():
    found = estimate("inductor", runtime="fsdp2", leave_eager=["loss"])
    assert sizes(found) == sizes(estimate("eager"))
    assert "not compiled: loss" in str(found)
    one, both, parts = (
        estimate("inductor", leave_eager=names).compute_seconds
        for names in (["layers.1"], ["layers"], ["layers.0", "layers.1"])
    )
    assert estimate("inductor").compute_seconds < one < both == parts


def test_a_name_without_effect_is_refused():
    with pytest.raises(CostError, match="names 'layer', but nothing that is compiled belongs"):
        estimate("inductor", leave_eager=["layer"])
    with pytest.raises(CostError, match="no effect where nothing is compiled"):
        estimate("eager", leave_eager=["loss"])
