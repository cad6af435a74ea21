"""Convert a torch.distributed checkpoint to safetensors, one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphshard.errors import CheckpointError
from graphshard.state.dcp import StoredCheckpoint, empty_like, open_checkpoint, read_entries
from graphshard.state.files import Target, write_files


@dataclass(frozen=True)
class Consolidation:
    """A conversion to run; `plan_consolidation` makes it from metadata alone.

    tensors: shape and dtype to write, by name.
    keys: key of each tensor in the checkpoint, by name.
    left_out: keys of entries that are no tensors.
    """

    stored: StoredCheckpoint
    target: Target
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    keys: dict[str, str]
    left_out: tuple[str, ...]

    def run(self, advance: Callable[[], None] = lambda: None) -> list[Path]:
        """Write the files and return their paths; call `advance` after each tensor."""

        def value(name: str) -> Iterator[Tensor]:
            key = self.keys[name]
            entry = self.stored.tensor(key)
            assert entry is not None
            tensors = {key: empty_like(entry)}
            read_entries(self.stored, tensors)
            yield tensors[key].to(self.tensors[name][1])
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
    trust: bool = False,
) -> Consolidation:
    """Plan the conversion of the directory `source` to `out`, from metadata alone.

    `key` names the dict that holds the model. None: "model" if it exists, else the only key if
    there is just one, else the whole checkpoint. One file has at most `max_shard_bytes`, unless a
    single tensor takes more; None: there is one file. `dtype` is that of written floating point
    tensors.
    """
    stored = open_checkpoint(source, trust=trust)
    stored.verify()
    prefix = _prefix(stored, key)
    keys = stored.below(prefix)
    if not keys:
        raise CheckpointError(f"{source} holds no tensors{f' below {key!r}' if key else ''}")
    tensors = {}
    for name, stored_key in keys.items():
        entry = stored.tensor(stored_key)
        assert entry is not None
        stored_dtype = entry.properties.dtype
        casts = dtype is not None and stored_dtype.is_floating_point
        tensors[name] = (tuple(entry.size), dtype if dtype and casts else stored_dtype)
    left_out = tuple(
        stored_key
        for stored_key, path in stored.paths.items()
        if path[: len(prefix)] == prefix and stored.tensor(stored_key) is None
    )
    target = Target(Path(out), max_shard_bytes)
    target.assign(tensors)
    return Consolidation(stored, target, tensors, keys, left_out)


def _prefix(stored: StoredCheckpoint, key: str | None) -> tuple[str, ...]:
    prefixes = stored.prefixes()
    if key is not None:
        if (key,) not in prefixes:
            key_names = ", ".join(repr(p[0]) for p in prefixes if p) or "none"
            raise CheckpointError(f"{stored.folder} has no key {key!r}; its keys are: {key_names}")
        return (key,)
    if ("model",) in prefixes:
        return ("model",)
    at_top = any(len(path) == 1 for path in stored.paths.values())
    return prefixes[1] if len(prefixes) == 2 and not at_top else ()
