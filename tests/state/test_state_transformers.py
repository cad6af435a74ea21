"""Checkpoints of transformers: from_pretrained reads what is saved, and what it saved is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from state_checks import assert_same, full_state, on_meta, refuses, seeded, shared_folder
from torch import nn
from transformers import LlamaForCausalLM

import graphshard
from graphshard.errors import CheckpointError, RuntimeStateError
from graphshard.policy import placement

POLICY = graphshard.BlockPolicy()
SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def llama() -> nn.Module:
    """Its rotary embedding is a buffer that no checkpoint has."""
    return models.llama(vocab_size=64, hidden_size=32, intermediate_size=48)


def gpt2() -> nn.Module:
    """Tied, and with a prefix."""
    return models.gpt2(**SMALL)


def gpt2_base() -> nn.Module:
    return models.of_transformers("GPT2", "Model", **SMALL)


t5 = models.CASES["t5"].build
"""An embedding under three names."""


def batch() -> dict[str, Any]:
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def there_and_back(make: Callable[[], nn.Module], folder: Path) -> None:
    model = seeded(make).eval()
    expected = full_state(model)
    sharded = graphshard.compile(model, POLICY)
    first = not dist.is_initialized() or dist.get_rank() == 0
    sharded.save_pretrained(folder / "one")
    sharded.save_pretrained(folder / "many", max_shard_bytes=8000)
    state = sharded.full_state_dict()
    if first:
        model.save_pretrained(folder / "theirs", state_dict=state)
    if dist.is_initialized():
        dist.barrier()
    for name in ("one", "many", "theirs"):
        if first:
            again, report = type(model).from_pretrained(folder / name, output_loading_info=True)
            assert not any(report.values()), report
            assert_same(full_state(again), expected)
        empty = graphshard.compile(on_meta(make), POLICY)
        assert empty.load_safetensors(folder / name) == ([], [])
        assert_same(full_state(empty), expected)
    with torch.no_grad():
        assert torch.equal(empty.eval()(**batch()).loss, model(**batch()).loss)


@pytest.mark.parametrize("make", [gpt2, t5], ids=["gpt2", "t5"])
def test_there_and_back_on_one_rank(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    there_and_back(make, tmp_path)


def on_ranks(rank: int) -> None:
    with mock.patch.multiple(placement, MIN_PADDING=0, MAX_PADDING=0.0):
        _on_ranks(rank, shared_folder())


def _on_ranks(rank: int, folder: Path) -> None:
    there_and_back(llama, folder)
    # As Accelerate's cpu_ram_efficient_loading: only rank 0 has the weights, and even the files.
    policy = graphshard.BlockPolicy(sync_module_states=True)
    model = LlamaForCausalLM.from_pretrained(folder / "one") if rank == 0 else on_meta(llama)
    sharded = graphshard.compile(model, policy)
    assert_same(full_state(sharded), full_state(seeded(llama)))
    sharded(**batch()).loss.backward()
    sharded = graphshard.compile(on_meta(llama), POLICY)
    sharded.load_safetensors(folder / "one" if rank == 0 else "nowhere", read="first")
    assert_same(full_state(sharded), full_state(seeded(llama)))
    plain = graphshard.compile(nn.Linear(3, 3), graphshard.BlockPolicy({nn.Linear}))
    refuses(plain, lambda: plain.save_pretrained(folder / "no"), "Linear has none; use save_safe")


@pytest.mark.parametrize("world_size", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_on_ranks(world_size: int) -> None:
    """Six ranks split 32 rows unevenly, or on a grid of two by three."""
    run_ranks(on_ranks, world_size)


def test_with_and_without_a_head(tmp_path: Path) -> None:
    model = seeded(gpt2)
    base = {n.removeprefix("transformer."): v for n, v in full_state(model).items()}
    del base["lm_head.weight"]  # tied to an embedding of the base
    graphshard.compile(model, POLICY).save_safetensors(tmp_path / "head.safetensors")
    inner = graphshard.compile(on_meta(gpt2_base), POLICY)
    inner.load_safetensors(tmp_path / "head.safetensors")
    assert_same(full_state(inner), base)
    inner.save_safetensors(tmp_path / "base.safetensors")
    outer = graphshard.compile(on_meta(gpt2), POLICY)
    outer.load_safetensors(tmp_path / "base.safetensors")
    assert_same(full_state(outer), full_state(model))


def test_a_missing_buffer_that_nothing_computes_is_named(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.mask

    policy = graphshard.BlockPolicy({nn.Linear})
    graphshard.compile(Masked(), policy).save_safetensors(tmp_path / "x.safetensors")
    sharded = graphshard.compile(on_meta(Masked), policy)
    sharded.load_safetensors(tmp_path)
    with pytest.raises(RuntimeStateError, match="buffer 'mask' has no values yet"):
        sharded(torch.ones(2, 4))


def test_another_model_is_said(tmp_path: Path) -> None:
    graphshard.compile(gpt2(), POLICY).save_safetensors(tmp_path / "x.safetensors")
    sharded = graphshard.compile(t5(), POLICY)
    with pytest.raises(CheckpointError, match=r"has no 'shared.weight'.*is it another model's\?"):
        sharded.load_safetensors(tmp_path)
