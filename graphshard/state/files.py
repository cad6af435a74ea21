"""Safetensors checkpoints on disk: one file, a directory, or an index of several files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath

import torch
from torch import Tensor

from graphshard.errors import CheckpointError
from graphshard.plain_data import read_json, shown
from graphshard.state.raw import StoredTensor, Writer, read_header

NAME = "model.safetensors"


INDEX = "model.safetensors.index.json"


Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


def open_files(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint at `path` by name; read headers only.

    Args:
        path: a .safetensors file; an index (.json) as transformers writes it; or a directory with
            `model.safetensors.index.json`, `model.safetensors`, or one other .safetensors file.
    """
    file_or_index = Path(path)
    if file_or_index.is_dir():
        file_or_index = _in_directory(file_or_index)
    if not file_or_index.is_file():
        raise CheckpointError(f"there is no checkpoint at {file_or_index}")
    if file_or_index.suffix != ".json":
        return read_header(file_or_index)
    weight_map = _weight_map(file_or_index)
    names = dict.fromkeys(weight_map.values())
    files = {name: read_header(_named(file_or_index, name)) for name in names}
    entries = {}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise CheckpointError(
                f"{file_or_index} says that {shown(name)} is in {file}, which lacks it"
            )
        entries[name] = files[file][name]
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor by an index."""
    data = read_json(index, "the index", CheckpointError)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(
            f"{index} is no index of safetensors files: it lacks a weight_map from tensors to files"
        )
    return files


def is_inside(folder: Path, name: str) -> bool:
    """Whether the file `name`, as another file of `folder` gives it, lies in `folder`.

    Links count as the files they lead to. Those of a snapshot in the cache of Hugging Face
    (`snapshots/<revision>/`) may lead to the `blobs/` of the same repository.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        return False
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle
        return False
    snapshots = [place for place in home.parents[:2] if place.name == "snapshots"]
    places = [home, *(place.parent / "blobs" for place in snapshots)]
    return any(real.is_relative_to(place) for place in places)


def _named(index: Path, name: str) -> Path:
    if not is_inside(index.parent, name):
        raise CheckpointError(
            f"{index} names the file {shown(name)}, which is not inside of {index.parent}; a "
            "checkpoint holds all its files (if they are links, load the folder they lead to)"
        )
    return index.parent / name


def _in_directory(folder: Path) -> Path:
    for name in (INDEX, NAME):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return indices[0]
    if files:
        raise CheckpointError(
            f"{folder} holds {len(files)} .safetensors files and no index; name the file to load"
        )
    hint = ""
    if (folder / ".metadata").is_file():
        hint = "; it is a checkpoint of torch.distributed: use load_checkpoint"
    elif any(folder.glob("*.bin")):
        hint = (
            "; it holds pickled tensors (.bin), which cannot be read in parts: convert them with "
            "transformers' save_pretrained"
        )
    raise CheckpointError(f"{folder} holds no .safetensors file{hint}")


@dataclass(frozen=True)
class Target:
    """The file or directory to write a checkpoint to."""

    path: Path
    max_shard_bytes: int | None = None

    def assign(self, tensors: Shapes) -> dict[str, list[str]]:
        """Return the names of the tensors of each file, in order."""
        limit = self.max_shard_bytes
        files: list[list[str]] = [[]]
        file_bytes = 0
        for name, (shape, dtype) in tensors.items():
            tensor_bytes = prod(shape) * dtype.itemsize
            if limit is not None and files[-1] and file_bytes + tensor_bytes > limit:
                files.append([])
                file_bytes = 0
            files[-1].append(name)
            file_bytes += tensor_bytes
        if len(files) == 1:
            return {self.path.name if self.single else NAME: files[0]}
        if self.single:
            raise CheckpointError(
                f"{self.path.name} names one file, and {len(files)} are needed to keep each below "
                f"{limit} bytes; name a directory"
            )
        stem, suffix = NAME.split(".")
        count = len(files)
        return {f"{stem}-{i:05}-of-{count:05}.{suffix}": names for i, names in enumerate(files, 1)}

    @property
    def single(self) -> bool:
        """Whether the target is one file."""
        return self.path.suffix == ".safetensors"

    @property
    def folder(self) -> Path:
        """The directory of the files."""
        return self.path.parent if self.single else self.path


class TargetFiles:
    """The files of a checkpoint, under temporary names until all are complete.

    Args:
        target: the file or directory.
        tensors: shape and dtype of each tensor by name, in the order to write.
    """

    def __init__(self, target: Target, tensors: Shapes) -> None:
        self._target = target
        self._tensors = tensors
        self._files: dict[str, list[str]] = {}
        self._writers: list[Writer] = []

    def open(self) -> None:
        """Make the directory and begin the first file."""
        self._files = self._target.assign(self._tensors)
        self._target.folder.mkdir(parents=True, exist_ok=True)
        self._next_file()

    def _next_file(self) -> None:
        if self._writers:
            self._writers[-1].finish()
        file, names = [*self._files.items()][len(self._writers)]
        shapes = {name: self._tensors[name] for name in names}
        self._writers.append(Writer(self._target.folder / file, shapes))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, or its next rows, in its dtype."""
        while name not in self._writers[-1].tensors:
            self._next_file()
        self._writers[-1].write(tensor)

    def commit(self) -> list[Path]:
        """Give all files their names, and return them."""
        self._writers[-1].finish()
        for writer in self._writers:
            writer.close()
        target, files = self._target, self._files
        written = [target.folder / file for file in files]
        if len(files) > 1:
            written.append(_write_index(target.folder, files, self._tensors))
        elif not target.single:
            # A reader would prefer an index that an earlier, larger checkpoint left here.
            (target.folder / INDEX).unlink(missing_ok=True)
        return written

    def abandon(self) -> None:
        """Remove what has no name yet."""
        for writer in self._writers:
            writer.abandon()


def write_files(
    target: Target, tensors: Shapes, value: Callable[[str], Iterator[Tensor]]
) -> list[Path]:
    """Write a checkpoint tensor by tensor and return its files.

    Args:
        target: the file or directory.
        tensors: shape and dtype of each tensor by name, in the order to write.
        value: yields the tensor of a name in its dtype, whole or in pieces of rows.
    """
    files = TargetFiles(target, tensors)
    try:
        files.open()
        for name in tensors:
            for piece in value(name):
                files.write(name, piece)
                del piece  # free it before the next one is made
        return files.commit()
    except BaseException:
        files.abandon()
        raise


def _write_index(folder: Path, files: Mapping[str, Sequence[str]], tensors: Shapes) -> Path:
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    index = folder / INDEX
    index.write_text(text + "\n")
    return index
