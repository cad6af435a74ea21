"""`graphshard consolidate DIR OUT`: convert a sharded checkpoint to safetensors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphshard.cli.policy import parse_bytes
from graphshard.errors import CheckpointError
from graphshard.format import some_of
from graphshard.policy.precision import DTYPES
from graphshard.progress import Progress
from graphshard.state.dcp import StoredCheckpoint, empty_like, open_checkpoint, read_entries
from graphshard.state.files import Target, write_files


def add_consolidate(commands: Any) -> None:
    """Add the command to the parser of all commands."""
    summary = "merge a sharded checkpoint into safetensors, one tensor in memory at a time"
    command: argparse.ArgumentParser = commands.add_parser(
        "consolidate", usage="%(prog)s DIR OUT [OPTIONS]", help=summary, description=summary
    )
    command.add_argument(
        "source",
        type=Path,
        metavar="DIR",
        help="a directory written by torch.distributed.checkpoint",
    )
    command.add_argument(
        "out", type=Path, metavar="OUT", help="a .safetensors file, or a directory for several"
    )
    command.add_argument(
        "--max-shard-size",
        type=parse_bytes,
        metavar="BYTES",
        help="of one file, e.g. 5GB; several get an index as transformers reads it",
    )
    command.add_argument(
        "--key", help='of the dict that holds the model (default: "model", or the only one)'
    )
    command.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of floating point values (default: as they are)"
    )
    command.add_argument(
        "--trust", action="store_true", help="unpickle all of it, which may run its author's code"
    )
    command.add_argument("--times", action="store_true", help="say how long each stage took")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run_consolidate)


def run_consolidate(options: argparse.Namespace, progress: Progress) -> str:
    """Convert the checkpoint; return the written files, one per line, and the left-out keys."""
    if options.out.suffix in (".bin", ".pt", ".pth"):
        raise CheckpointError(f"{options.out} must be a .safetensors file or a directory")
    with progress.stage("read the metadata"):
        consolidation = plan_consolidation(
            options.source,
            options.out,
            key=options.key,
            max_shard_bytes=options.max_shard_size,
            dtype=DTYPES.get(options.dtype),
            trust=options.trust,
        )
    with progress.stage("write tensors", total=len(consolidation.tensors)):
        lines = [str(path) for path in consolidation.run(progress.advance)]
    if consolidation.left_out:
        lines.append(f"left out, since they are no tensors: {some_of(consolidation.left_out)}")
    return "\n".join(lines)


# -- the conversion --------------------------------------------------------------------------------


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
