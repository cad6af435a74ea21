"""A trace of a small sharded model, and a factory of that model for commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import Block, TiedGPT, tokens_of
from torch.profiler import ProfilerActivity, profile

import graphshard

POLICY = graphshard.BlockPolicy({Block}, forward_prefetch=1)


FACTORY = """
from models import TiedGPT, tokens_of

def gpt():
    return TiedGPT(2), tokens_of(0, 0)
"""


def trace_steps(folder: Path) -> tuple[graphshard.ShardedModule, list[str]]:
    """Train three steps on one rank; write their trace and a factory into `folder`.

    Returns the module, and the arguments of a command on the factory under its policy. The trace is
    `trace.json.gz`.
    """
    (folder / "traced_factory.py").write_text(FACTORY)
    sharded = graphshard.compile(TiedGPT(2), POLICY)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            sharded(*tokens_of(0, 0)).backward()
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    arguments = ["traced_factory:gpt", "--policy", "block:Block", "--forward-prefetch", "1"]
    return sharded, [*arguments, "--hardware", "cpu-gloo"]


def estimate(world_size: int = 2, layers: int = 2, **fields: Any) -> graphshard.Estimate:
    """A step of the model on H100s, under that policy or one of the block's `fields`."""
    with torch.device("meta"):
        model = TiedGPT(layers)
    policy = graphshard.BlockPolicy({Block}, **fields) if fields else POLICY
    plan = graphshard.plan(model, policy, world_size=world_size, example_inputs=tokens_of(0, 0))
    return graphshard.simulate(plan, hardware="h100-sxm")
