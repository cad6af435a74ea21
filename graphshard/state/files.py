"""Safetensors checkpoints as they lie on disk: one file, a directory, or an index of several."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from graphshard.errors import CheckpointError
from graphshard.state.raw import Entry, Writer, read_header

NAME = "model.safetensors"


INDEX = "model.safetensors.index.json"


Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


def open_files(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Every tensor of the checkpoint at `path`, by name; reads headers only.

    Args:
        path: a .safetensors file; an index (.json) as transformers writes it; or a directory with
            `model.safetensors.index.json`, `model.safetensors`, or one other .safetensors file.

    Raises:
        CheckpointError: there is none, or a file is missing, cut off or damaged; names it.
    """
    place = Path(path)
    if place.is_dir():
        place = _in_directory(place)
    if not place.is_file():
        raise CheckpointError(f"there is no checkpoint at {place}")
    if place.suffix != ".json":
        return read_header(place)
    try:
        weight_map = json.loads(place.read_text())["weight_map"]
        files = {
            name: read_header(place.parent / name) for name in dict.fromkeys(weight_map.values())
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{place} is no index of safetensors files: it lacks a weight_map from tensors to files"
        ) from error
    entries = {}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise CheckpointError(f"{place} says that {name!r} is in {file}, which lacks it")
        entries[name] = files[file][name]
    return entries


def _in_directory(folder: Path) -> Path:
    for name in (INDEX, NAME):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return indices[0]
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} .safetensors files and no index; name the file to load"
        )
    hint = ""
    if (folder / ".metadata").is_file():
        hint = "; it is a checkpoint of torch.distributed: use load_checkpoint"
    elif any(folder.glob("*.bin")):
        hint = (
            "; what it holds is pickled (.bin), which cannot be read in parts: convert it with "
            "transformers' save_pretrained"
        )
    raise CheckpointError(f"{folder} holds no .safetensors file{hint}")


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is to be written: a file or a directory."""

    path: Path
    max_shard_bytes: int | None = None

    def assign(self, tensors: Shapes) -> dict[str, list[str]]:
        """The tensors of each file, in order; several files only in a directory.

        Raises:
            CheckpointError: one file was named, and the tensors take more than `max_shard_bytes`.
        """
        limit = self.max_shard_bytes
        parts: list[list[str]] = [[]]
        size = 0
        for name, (shape, dtype) in tensors.items():
            this = prod(shape) * dtype.itemsize
            if limit is not None and parts[-1] and size + this > limit:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += this
        if len(parts) == 1:
            return {self.path.name if self.single else NAME: parts[0]}
        if self.single:
            raise CheckpointError(
                f"{self.path.name} names one file, and {len(parts)} are needed to keep each below "
                f"{limit} bytes; name a directory"
            )
        stem, suffix = NAME.split(".")
        count = len(parts)
        return {f"{stem}-{i:05}-of-{count:05}.{suffix}": names for i, names in enumerate(parts, 1)}

    @property
    def single(self) -> bool:
        """Whether it is one file."""
        return self.path.suffix == ".safetensors"

    @property
    def folder(self) -> Path:
        """The directory of its files."""
        return self.path.parent if self.single else self.path


def write_files(
    target: Target, tensors: Shapes, value: Callable[[str], Iterator[Tensor]]
) -> list[Path]:
    """Write a checkpoint, tensor by tensor; returns its files.

    Args:
        target: where.
        tensors: shape and dtype of each, by name, in order.
        value: the tensor of a name, whole or in pieces of rows, in its dtype.

    Raises:
        CheckpointError: see `Target.assign` and `Writer`.
        OSError: a file cannot be written; files that were complete by then are left.
    """
    files = target.assign(tensors)
    target.folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        writer = Writer(target.folder / file, {name: tensors[name] for name in names})
        try:
            for name in names:
                for piece in value(name):
                    writer.write(piece)
                    del piece  # not to be held while the next is made
        except BaseException:
            writer.abandon()
            raise
        writer.close()
    written = [target.folder / file for file in files]
    if len(files) > 1:
        written.append(_write_index(target.folder, files, tensors))
    elif not target.single:
        # Else a reader would prefer the index that an earlier, larger checkpoint left here.
        (target.folder / INDEX).unlink(missing_ok=True)
    return written


def _write_index(folder: Path, files: Mapping[str, Sequence[str]], tensors: Shapes) -> Path:
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    index = folder / INDEX
    index.write_text(text + "\n")
    return index
