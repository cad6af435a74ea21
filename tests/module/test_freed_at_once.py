"""Dropping a sharded module frees its memory at once, without Python's garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import Block, TiedGPT, tokens_of
from paths import ROOT
from ranks import on_ranks

import graphshard
from graphshard import BlockPolicy, MixedPrecision


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def trained(rank: int, backend: str = "eager", **fields: Any) -> dict[str, weakref.ref[Any]]:
    """Train a module for two steps and drop it: references to what it consisted of."""
    torch.manual_seed(0)
    policy = BlockPolicy({Block}, **fields)
    sharded = graphshard.compile(TiedGPT(2), policy, backend=backend)
    optimizer = sharded.optimizer(torch.optim.AdamW)
    with sharded.no_sync():
        sharded(*tokens_of(rank, 0)).backward()
    for step in (1, 2):
        sharded(*tokens_of(rank, step)).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
    with torch.no_grad():
        sharded(*tokens_of(rank, 3))
    state = sharded._graphshard
    kept: dict[str, Any] = {"module": sharded, "programs": state.programs}
    kept |= {f"step {i}": step for i, step in enumerate(state.programs.steps.values())}
    for shard in state.shards:
        name = shard.layout.fqn
        kept |= {f"shard of {name}": shard, f"{name}": shard.param}
        kept |= {f"storage of {name}": shard.storage, f"gradient of {name}": shard.param.grad}
    return {name: weakref.ref(thing) for name, thing in kept.items()}


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checked": {"check_finite": "error"},
    "overlap": {"schedule": "overlap"},
    "zero1": {"strategy": "SHARD_OPTIMIZER"},
    "several": {
        "mixed_precision": MixedPrecision(torch.bfloat16),
        "recompute": "units",
        "offload": ("params", "activations"),
    },
}


def freed(rank: int, name: str, backend: str = "eager") -> None:
    with no_collections():
        refs = trained(rank, backend, **POLICIES[name])
        alive = [what for what, ref in refs.items() if ref() is not None]
    assert not alive, (name, alive)


@pytest.mark.parametrize("name", ["plain", "checked"])
def test_one_rank(name: str) -> None:
    freed(0, name)


def freed_on_ranks(rank: int) -> None:
    for name in POLICIES:
        freed(rank, name)


@pytest.mark.slow
def test_compiled_regions() -> None:
    freed(0, "plain", "inductor")


test_on_two_ranks = pytest.mark.slow(on_ranks([freed_on_ranks], 2, timeout=300.0))


FIRST = """
import gc, weakref, torch, graphshard
gc.disable()
def made():
    sharded = graphshard.compile(torch.nn.Linear(4, 4), graphshard.SizePolicy(1))
    torch.optim.AdamW(sharded.parameters())
    sharded(torch.randn(2, 4)).sum().backward()
    return weakref.ref(sharded), weakref.ref(sharded.weight)
refs = made()
assert "torch._dynamo" in __import__("sys").modules
assert all(ref() is None for ref in refs), refs
"""


@pytest.mark.slow
def test_the_first_capture_of_a_process() -> None:
    """It imports parts of torch, whose modules keep the frames that import them."""
    run = subprocess.run(
        [sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
