"""Safetensors checkpoints, read and written piece by piece: a file, a directory, or an index.

A file is 8 bytes (length of the header, little endian), a JSON header with each tensor's dtype,
shape and byte range, and the tensors' bytes, row by row. So any region of a tensor can be read by
its offset, and a file can be written tensor by tensor once all shapes are known. See
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch import Tensor

from graphshard.errors import CheckpointError
from graphshard.plain_data import from_json, read_json, shown

Region = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop per dim."""


Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of each tensor of a checkpoint, by its key."""


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


_CODES = {dtype: code for code, dtype in _DTYPES.items()}


_LENGTH_BYTES = 8


_HEADER_BYTES = 100_000_000
"""The most that safetensors' own reader takes."""


_DIMS = 64
"""The most dims of a tensor of torch."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; its bytes begin at offset `start` of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def bytes(self) -> int:
        """Number of its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self, region: Region) -> Tensor:
        """Read the part of it in `region` to the CPU, and no other bytes."""
        sizes = [dim.stop - dim.start for dim in region]
        result = torch.empty(sizes, dtype=self.dtype, device="cpu")
        if result.numel() == 0:
            return result
        target = memory_of(result)
        done = 0
        with self.file.open("rb") as file:
            for first, count in _runs(self.shape, region):
                file.seek(self.start + first * self.dtype.itemsize)
                stop = done + count * self.dtype.itemsize
                if file.readinto(target[done:stop]) != stop - done:
                    raise CheckpointError(f"{self.file} ends before its header says; copy it again")
                done = stop
        require_bools(result, str(self.file))
        return result


def _runs(shape: Sequence[int], region: Region) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of elements in `region` as (first, count)."""
    last = max(
        (d for d, size in enumerate(shape) if (region[d].start, region[d].stop) != (0, size)),
        default=0,
    )
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    if not shape:
        yield 0, 1
        return
    count = (region[last].stop - region[last].start) * strides[last]
    for outer in itertools.product(*(range(r.start, r.stop) for r in region[:last])):
        first = sum(i * s for i, s in zip(outer, strides, strict=False))
        yield first + region[last].start * strides[last], count


def require_bools(tensor: Tensor, where: str) -> None:
    """Check that the bytes of a tensor of bools are 0 or 1, since torch relies on it."""
    if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        raise CheckpointError(f"{where} has a bool whose byte is neither 0 nor 1; it is damaged")


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor."""
    array = (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors in `file` by name, all checked against the size of the file."""
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > size - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{file} is no complete safetensors file: its header should take {length} "
                    f"bytes and the file has {size}; copy it again"
                )
            if length > _HEADER_BYTES:
                raise CheckpointError(
                    f"{file} is no safetensors file: its header takes {length} bytes and may take "
                    f"{_HEADER_BYTES}"
                )
            text = stream.read(length)
        header = from_json(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}") from error
    if not text.startswith(b"{"):
        raise _malformed(file, "a mapping of names to tensors begins with {")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise _malformed(file, "__metadata__ maps texts to texts")
    base = _LENGTH_BYTES + length
    entries = {name: _entry(file, name, info, base, size) for name, info in header.items()}
    end, last = base, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves a gap after"
            raise _malformed(file, f"{shown(name)} {fault} {shown(last) if last else 'the header'}")
        end, last = end + entry.bytes, name
    if end != size:
        raise _malformed(file, f"tensors end at byte {end} and the file at {size}")
    return entries


def _malformed(file: Path, rule: str) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read as a safetensors file: its header is malformed ({rule})"
    )


def _entry(file: Path, name: str, info: Any, base: int, size: int) -> StoredTensor:
    if not isinstance(info, dict) or not info.keys() >= {"dtype", "shape", "data_offsets"}:
        raise _malformed(file, f"{shown(name)} has a dtype, a shape and data_offsets")
    code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise CheckpointError(f"{shown(name)} in {file} has dtype {shown(code)}, unknown to torch")
    if not _are_sizes(shape) or len(shape) > _DIMS or prod(max(d, 1) for d in shape) >= 1 << 63:
        raise _malformed(file, f"{shown(name)} has shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _malformed(file, f"{shown(name)} has data_offsets {shown(offsets)}")
    start, stop = offsets
    entry = StoredTensor(file, tuple(shape), _DTYPES[code], base + start)
    if entry.bytes != stop - start:
        raise CheckpointError(
            f"the header of {file} gives {shown(name)} {stop - start} bytes, which do not agree "
            f"with {code} {list(entry.shape)}; the file is damaged"
        )
    if base + stop > size:
        raise CheckpointError(
            f"{file} is cut off: {shown(name)} ends at byte {base + stop} and the file at {size}; "
            "copy it again"
        )
    return entry


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


class Writer:
    """Writes a file tensor by tensor, in the order of its header.

    The file has a temporary name until it is complete, so no half-written file remains.
    """

    def __init__(self, file: Path, tensors: Shapes) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            if dtype not in _CODES:
                raise CheckpointError(f"{name!r} is {dtype}, which safetensors files cannot hold")
            start, end = end, end + prod(shape) * dtype.itemsize
            code = _CODES[dtype]
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.file = file
        self.tensors = tensors
        self._unfinished = file.with_name(f"{file.name}.part")
        self._stream: IO[bytes] = self._unfinished.open("wb")
        self._stream.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, or its next rows, in its dtype."""
        self._stream.write(memory_of(tensor.detach().cpu().contiguous()))

    def finish(self) -> None:
        """Complete the file under its temporary name."""
        self._stream.close()

    def close(self) -> None:
        """Finish the file and give it its name."""
        self.finish()
        os.replace(self._unfinished, self.file)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._stream.close()
        self._unfinished.unlink(missing_ok=True)


NAME = "model.safetensors"


INDEX = "model.safetensors.index.json"


def open_files(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint at `path` by name; read headers only.

    It is a .safetensors file; an index (.json) as transformers writes it; or a directory with
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
    """The files of a checkpoint, under temporary names until all are complete."""

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

    `value` yields the tensor of a name in its dtype, whole or in pieces of rows.
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
