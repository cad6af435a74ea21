"""Dropping a sharded module frees its memory at once, without Python's garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, TiedGPT, tokens_of
from paths import ROOT
from ranks import on_ranks, run_ranks

import graphshard
from graphshard import BlockPolicy, MixedPrecision
from graphshard.errors import GraphshardError


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


@pytest.mark.parametrize("name", ["plain", pytest.param("checked", marks=pytest.mark.slow)])
def test_one_rank(name: str) -> None:
    freed(0, name)


def freed_on_ranks(rank: int) -> None:
    for name in POLICIES:
        freed(rank, name)


@pytest.mark.slow
def test_compiled_regions() -> None:
    freed(0, "plain", "inductor")


test_on_two_ranks = pytest.mark.slow(on_ranks([freed_on_ranks], 2, timeout=300.0))


class Unsaveable:
    pass


def failing_calls(
    sharded: graphshard.ShardedModule, rank: int, path: Path
) -> dict[str, Callable[[], object]]:
    """Calls that raise on all ranks, though the reason is on one alone."""
    is_last = rank == dist.get_world_size() - 1 if dist.is_initialized() else True

    def body() -> None:
        with sharded.unsharded():
            if is_last:
                raise ValueError("on purpose")

    return {
        "saves": lambda: sharded.save_checkpoint("/proc/never/step-1"),
        "saves a value": lambda: sharded.save_checkpoint(
            path / "a", extra={"x": Unsaveable() if is_last else 1}
        ),
        "loads": lambda: sharded.load_checkpoint(path / "none"),
        "loads what is cut": lambda: sharded.load_checkpoint(path / "cut"),
        "loads tensors": lambda: sharded.load_full_state_dict({}),
        "compares": lambda: sharded.check_replicas(leave_out="(" if is_last else None),
        "unshards": lambda: entered(sharded.unsharded("none" if is_last else "blocks")),
        "fails inside": body,
        "runs": lambda: sharded(*tokens_of(rank, 0)[:1] if is_last else tokens_of(rank, 0)),
        "gathers": lambda: sharded.full_state_dict(rank0_only=not is_last),
    }


def entered(context: Any) -> None:
    with context:
        pass


def freed_after_errors(rank: int, path: Path) -> None:
    """What a call that failed leaves behind does not keep the module."""
    bad: list[str] = []
    names = failing_calls(None, rank, path).keys()  # type: ignore[arg-type]
    for name in names:
        if name == "gathers" and not dist.is_initialized():
            continue
        with no_collections():
            sharded = graphshard.compile(TiedGPT(1), BlockPolicy({Block}))
            sharded(*tokens_of(rank, 0)).backward()
            if name == "loads what is cut":
                sharded.save_checkpoint(path / "cut")
                for file in (path / "cut").glob("__0*.distcp") if rank == 0 else ():
                    file.write_bytes(file.read_bytes()[:-9])
            failed = False
            try:
                failing_calls(sharded, rank, path)[name]()
            except (GraphshardError, TypeError, ValueError):
                failed = True
            ref = weakref.ref(sharded)
            del sharded
            assert failed, name
            if ref() is not None:
                bad.append(name)
    assert not bad, bad


@pytest.mark.slow
def test_after_errors_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(freed_after_errors, 2, tmp_path)


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
