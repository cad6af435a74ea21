"""A sharded checkpoint of torch.distributed into safetensors, one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphshard.errors import CheckpointError
from graphshard.state.dcp import Stored, empty_like, open_checkpoint, read_entries
from graphshard.state.files import Target, write_files


@dataclass(frozen=True)
class Consolidation:
    """What is to be merged; made by `plan_consolidation`, which reads metadata only.

    tensors: shape and dtype to write, by name.
    keys: where each lies in the checkpoint.
    left_out: entries below the same key that are no tensors.
    """

    stored: Stored
    target: Target
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    keys: dict[str, str]
    left_out: tuple[str, ...]

    def run(self, advance: Callable[[], None] = lambda: None) -> list[Path]:
        """Write the files, calling `advance` after each tensor; returns their paths.

        Raises:
            CheckpointError: something cannot be read or written.
        """

        def value(name: str) -> Iterator[Tensor]:
            key = self.keys[name]
            entry = self.stored.tensor(key)
            assert entry is not None
            into = {key: empty_like(entry)}
            read_entries(self.stored, into)
            yield into[key].to(self.tensors[name][1])
            advance()

        try:
            return write_files(self.target, self.tensors, value)
        except OSError as error:
            raise CheckpointError(f"writing {self.target.path} failed: {error}") from error


def plan_consolidation(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    key: str | None = None,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> Consolidation:
    """Find what to merge from directory `source` into `out`, a .safetensors file or a directory.

    Args:
        source: written by torch.distributed.checkpoint.
        out: see above.
        key: of the dict that holds the model, such as "model". None: "model" if there is one, the
            only key if there is one, else all there is.
        max_shard_bytes: of one file, unless a single tensor takes more. None: one file.
        dtype: of floating point values. None: as they are.

    Raises:
        CheckpointError: it is no checkpoint, is damaged, or has no such key or no tensors there;
            or one file was named and several are needed.
    """
    stored = open_checkpoint(source)
    prefix = _prefix(stored, key)
    keys = stored.below(prefix)
    if not keys:
        raise CheckpointError(f"{source} holds no tensors{f' below {key!r}' if key else ''}")
    tensors = {}
    for name, at in keys.items():
        entry = stored.tensor(at)
        assert entry is not None
        own = entry.properties.dtype
        wanted = dtype if dtype is not None and own.is_floating_point else own
        tensors[name] = (tuple(entry.size), wanted)
    left_out = tuple(
        at
        for at, path in stored.paths.items()
        if path[: len(prefix)] == prefix and stored.tensor(at) is None
    )
    target = Target(Path(out), max_shard_bytes)
    target.assign(tensors)
    return Consolidation(stored, target, tensors, keys, left_out)


def _prefix(stored: Stored, key: str | None) -> tuple[str, ...]:
    above = stored.prefixes()
    if key is not None:
        if (key,) not in above:
            known = ", ".join(repr(p[0]) for p in above if p) or "none"
            raise CheckpointError(f"{stored.folder} has no key {key!r}; its keys are: {known}")
        return (key,)
    if ("model",) in above:
        return ("model",)
    at_top = any(len(path) == 1 for path in stored.paths.values())
    return above[1] if len(above) == 2 and not at_top else ()
