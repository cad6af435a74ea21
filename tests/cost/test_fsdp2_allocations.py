"""What torch's FSDP2 allocates, where graphshard's own runtime allocates something else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphshard
from graphshard.cost.allocations import fsdp2_lives
from graphshard.program.program import BACKWARD

WIDTH, TOKENS = 64, 128


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    """Nothing of backward reads what `down` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def once(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, products)
        out: Tensor = checkpoint(self.once, x, use_reentrant=False, context_fn=contexts)
        return out


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_selective_checkpoints_keep_what_their_policy_saves(backend: str) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(Layer(), Layer()), torch.zeros(TOKENS, WIDTH)
    plan = graphshard.plan(
        model, graphshard.BlockPolicy({Layer}), world_size=2, example_inputs=(x,), backend=backend
    )
    program = plan.program
    assert program is not None
    down = [n for n in program.nodes() if n.meta.get("fqn", "").endswith(".down")]
    computed = [n.name for n in down if n.target is torch.ops.aten.mm.default][:2]
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    lives = {life.name: life for life in fsdp2_lives(program)}
    for index, name in enumerate(computed):
        backward = [
            place[node]
            for node in program.nodes()
            if node.meta["phase"] == BACKWARD and node.meta.get("unit") == str(index)
        ]
        if backend == "eager":
            assert min(backward) < lives[name].dies <= max(backward)
        else:
            assert name not in lives or lives[name].dies < place[program.first_backward()]
