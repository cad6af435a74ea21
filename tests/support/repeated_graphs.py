"""CUDA graphs on a machine without CUDA: their "replay" runs the captured function again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import graphshard
from graphshard.passes import cuda_graph as graphable
from graphshard.runtime import cuda_graphs
from graphshard.runtime.gather import Gathered
from graphshard.runtime.group import Group


class Repeated:
    """Stands for what captures on a GPU.

    Its replay runs the function again on the tensors it was captured with, and writes what comes
    out over what came out then, as kernels at fixed addresses do. Unlike a capture on a GPU, this
    one executes what it captures.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.alive = 0

    def capture(self, run: Any, args: list[Any]) -> tuple[Any, Any]:
        self.captured += 1
        held = list(args)
        before = [(t.untyped_storage(), t.untyped_storage().clone()) for t in _tensors(held)]
        state = torch.get_rng_state()
        result = run(args)
        torch.set_rng_state(state)  # a capture draws nothing, and frees no argument
        for storage, value in before:
            _fill(storage, value)
        sizes = [(t, t.untyped_storage().nbytes()) for t in _tensors(result)]

        def replay() -> None:
            self.replayed += 1
            for storage, value in before:
                if not storage.nbytes():
                    storage.resize_(value.nbytes())
            new = _tensors(run(list(held)))
            for (old, size), tensor in zip(sizes, new, strict=True):
                if old.untyped_storage().nbytes() != size:
                    old.untyped_storage().resize_(size)
                if old.data_ptr() != tensor.data_ptr():
                    old.copy_(tensor)

        self.alive += 1
        return SimpleNamespace(replay=replay, reset=self.reset), result

    def reset(self) -> None:
        self.alive -= 1


@contextmanager
def graphs_on_cpu(recorder: Any, *, on_ranks: bool = False) -> Iterator[None]:
    """Inside, programs on the CPU are captured by `recorder`; with `on_ranks` over Gloo, too."""
    why_not = graphable.why_no_graph

    def on_cuda(program: graphshard.Program, plan: graphshard.ShardingPlan) -> str | None:
        device, program.device = program.device, "cuda"
        try:
            return why_not(program, plan)
        finally:
            program.device = device

    why_not_here = cuda_graphs._why_not_here

    def here(group: Group) -> str | None:
        return None if on_ranks else why_not_here(group)

    with (
        mock.patch.object(graphable, "why_no_graph", on_cuda),
        mock.patch.object(cuda_graphs, "Recorder", return_value=recorder),
        mock.patch.object(cuda_graphs, "_why_not_here", here),
    ):
        yield


def _fill(storage: torch.UntypedStorage, value: torch.UntypedStorage) -> None:
    if not storage.nbytes():
        storage.resize_(value.nbytes())
    storage.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [list(leaf) if isinstance(leaf, Gathered) else leaf for leaf in tree_leaves(tree)]
    return [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)]
