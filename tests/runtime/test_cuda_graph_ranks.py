"""Ranks capture CUDA graphs at the same call, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Block, TiedGPT, tokens_of
from ranks import checks_of, error_of, on_ranks
from repeated_graphs import Repeated, graphs_on_cpu

import graphshard
from graphshard.errors import FingerprintError, PolicyError, RuntimeStateError
from graphshard.runtime import cuda_graphs
from graphshard.runtime.cuda_graphs import registration
from graphshard.runtime.group import Group

EXPANDABLE = "max_split_size_mb:64, expandable_segments: True"
GRAPHS = graphshard.BlockPolicy(Block, cuda_graph=True)


class Failing(Repeated):
    """The capture number `at` fails, counted from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def capture(self, run: Any, args: list[Any]) -> tuple[Any, Any]:
        captured = super().capture(run, args)
        if self.captured == self.at:
            self.alive -= 1
            raise RuntimeError("out of memory, on purpose")
        return captured


@contextmanager
def compiled(
    recorder: Repeated, *, by_store: bool = False
) -> Iterator[tuple[graphshard.ShardedModule, graphshard.ShardedModule]]:
    """A module that replays graphs, and one that does not."""
    torch.manual_seed(0)
    model = TiedGPT(1)
    with graphs_on_cpu(recorder, on_ranks=True):
        sharded = graphshard.compile(model, GRAPHS)
        if by_store:  # as with NCCL
            agreement = sharded._graphshard.bindings.agreement
            agreement.group = replace(agreement.group, backend="nccl")
        yield sharded, graphshard.compile(model, graphshard.BlockPolicy(Block))


def losses(sharded: graphshard.ShardedModule, rank: int, steps: int = 4) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = sharded(*tokens_of(rank, step))
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in sharded.parameters())]
        sharded.zero_grad()
    return found


def all_capture_at_one_call(rank: int) -> None:
    recorder = Repeated()
    with compiled(recorder, by_store=True) as (sharded, eager):
        assert all(map(torch.equal, losses(sharded, rank), losses(eager, rank)))
    assert (recorder.captured, recorder.replayed) == (2, 4)


def a_capture_that_fails_on_one_rank_is_given_up_by_all(rank: int) -> None:
    recorder = Failing(1 if rank == 1 else 0)
    with compiled(recorder, by_store=True) as (sharded, eager):
        assert all(map(torch.equal, losses(sharded, rank), losses(eager, rank)))
    assert (recorder.captured, recorder.replayed, recorder.alive) == (1, 0, 0)
    why = ("on rank 1, whose log says why", "out of memory, on purpose")[rank]
    assert str(sharded.program.cuda_graphs) == f"none, since capture failed: {why}"


def a_backward_that_fails_on_one_rank_is_an_error_on_all(rank: int) -> None:
    recorder = Failing(2 if rank == 1 else 0)
    with compiled(recorder) as (sharded, eager):
        losses(sharded, rank, steps=2)
        loss = sharded(*tokens_of(rank, 2))
        with pytest.raises(RuntimeStateError, match="backward could not be captured"):
            loss.backward()
        assert all(map(torch.equal, losses(sharded, rank), losses(eager, rank)))
    assert (recorder.captured, recorder.alive) == (2, 0)


def other_shapes_are_refused_on_all_ranks(rank: int) -> None:
    with compiled(Repeated(), by_store=True) as (sharded, _):
        tokens, targets = tokens_of(rank, 0)
        length = 5 - rank
        message = error_of(
            lambda: sharded(tokens[:, :length], targets[:, :length]), FingerprintError
        )
        assert "rank 0: args[0] [4, 5] int64 (with cuda_graph=True the inputs of all" in message
        assert "rank 1: args[0] [4, 4] int64" in message
        sharded(tokens, targets).backward()


def a_call_that_waits_on_one_rank_holds_all_back(rank: int) -> None:
    """As an output that only one rank keeps."""
    recorder = Repeated()
    with compiled(recorder) as (sharded, _):
        tokens, targets = tokens_of(rank, 0)
        for _ in range(3):
            kept = sharded(tokens, targets)
        assert recorder.captured == 1
        if rank == 0:
            kept = None
        for _ in range(3):
            sharded(tokens[:, :3], targets[:, :3])
        assert recorder.captured == 1
        kept = None
        sharded(tokens[:, :3], targets[:, :3])
        assert kept is None
        assert recorder.captured == 2


test_on_two_ranks = on_ranks(checks_of(globals()), 2)


def test_registration_of_buffers_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    ranks = Group(None, 0, 2, torch.device("cpu"), backend="nccl")
    assert registration(ranks, cuda_graph=False) == ""
    assert registration(replace(ranks, size=1), cuda_graph=True) == ""
    assert registration(replace(ranks, backend="gloo"), cuda_graph=True) == ""
    monkeypatch.setattr(cuda_graphs, "allocator_settings", lambda: EXPANDABLE)
    assert registration(ranks, cuda_graph=True) == "0"
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    with pytest.raises(PolicyError, match="expandable_segments:True ends in illegal"):
        registration(ranks, cuda_graph=True)
    monkeypatch.setattr(cuda_graphs, "allocator_settings", lambda: "")
    assert registration(ranks, cuda_graph=True) == "1"
