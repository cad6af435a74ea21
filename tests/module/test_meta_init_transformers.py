"""transformers models from the meta device: initialised in shards, then the model's own numbers."""

from __future__ import annotations

import pytest
import torch
from loops import same_step
from models import CASES

import graphshard


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_from_meta(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.build().train()
    sharded = graphshard.compile(model, graphshard.BlockPolicy(), check=True)
    sharded.init_weights(seed=1)
    real = case.build().train()
    for (name, mine), (_, theirs) in zip(
        sharded.named_parameters(), real.named_parameters(), strict=True
    ):
        spread = torch.stack([mine.std(), theirs.std()]) if mine.numel() > 1 else torch.zeros(2)
        torch.testing.assert_close(spread[0], spread[1], rtol=0.2, atol=1e-3, msg=name)
    real.load_state_dict(sharded.state_dict())
    for (name, mine), (_, theirs) in zip(
        sharded.named_buffers(), real.named_buffers(), strict=True
    ):
        assert torch.equal(mine, theirs), name  # rotary frequencies are in no state dict
    same_step(real, sharded, **case.inputs(0))
