"""What several tests of state compare and set up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from torch import Tensor, nn

import graphshard
from graphshard.errors import CheckpointError


def full_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(value.detach()).clone() for name, value in module.state_dict().items()}


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": full(value).clone()
        for name, entries in state["state"].items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert sorted(first) == sorted(second)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def shared_folder() -> Path:
    """A new directory, the same on all ranks."""
    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    return Path(paths[0])


class Stranger:
    """Makes a directory where a pickle of it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def refuses(
    sharded: graphshard.ShardedModule, call: Callable[[], Any], message: str, *more: Callable
) -> None:
    """`call` raises on every rank, with `message`, and changes nothing that `more` returns."""

    def own() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in sharded.local_state_dict().items()}

    before = [own(), *(read() for read in more)]
    with pytest.raises(CheckpointError, match=message) as caught:
        call()
    after = [own(), *(read() for read in more)]
    for old, new in zip(before, after, strict=True):
        assert_same(old, new)
    if dist.is_initialized():
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, str(caught.value))
        assert said == [said[0]] * len(said)
