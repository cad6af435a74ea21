"""Small models to tune, and simulators of them."""

from __future__ import annotations

import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from graphshard import AutoPolicy
from graphshard.hardware.hardware import OVERHEADS, Hardware
from graphshard.policy.tree import ModuleTree
from graphshard.tune.simulator import Captures, Simulator
from graphshard.tune.space import Blocks, Space

# Slow enough for the little there is to gather to matter.
SLOW = Hardware.load("h100-sxm").with_(
    memory_bytes=1 << 30,
    launch_floor=1e-7,
    intra_bandwidth=5e9,
    memory_bandwidth=1e11,
    overhead=dict.fromkeys(OVERHEADS, 0),
)


def gpt(layers: int = 2, width: int = 32) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=64, layers=layers, heads=2, width=width))
        tokens = torch.zeros(4, 32, dtype=torch.int64)
    return model, (tokens, tokens)


def simulator_of(model: nn.Module, inputs, auto: AutoPolicy, ranks: int = 4) -> Simulator:
    blocks = Blocks(ModuleTree(model))
    space = Space(auto, blocks, (ranks,), auto.described())
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return Simulator(Captures(model, args, kwargs, space.hardware.program_device), space)


# Live bytes, which are exact where all tensors are smaller than a segment of torch's allocator.
OPEN = AutoPolicy(hardware=SLOW, schedule="fsdp", offload=None, allocator="none")
