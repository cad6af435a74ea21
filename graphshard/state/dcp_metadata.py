"""Read and check `.metadata` of a checkpoint of torch.distributed, a pickle, without running code.

Checked is what torch's own load would take for a wrong value, or fail on without a file's name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from graphshard.errors import CheckpointError
from graphshard.plain_data import shown
from graphshard.state.files import is_inside
from graphshard.torch_private.compat import private

_STATEFUL = (
    descriptions.BytesStorageMetadata,
    descriptions.ChunkStorageMetadata,
    descriptions.Metadata,
    descriptions.MetadataIndex,
    descriptions.StorageMeta,
    descriptions.TensorProperties,
    descriptions.TensorStorageMetadata,
    private("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _STATEFUL},
    **{
        name: private(*name)
        for name in (
            (descriptions.__name__, "_MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
        )
    },
    ("torch", "Size"): torch.Size,
    # Where the checkpoint was written; by its name since Python 3.13, too.
    ("pathlib", "PosixPath"): PurePath,
    ("pathlib._local", "PosixPath"): PurePath,
}


class _UnknownClassError(Exception):
    """The pickle names something else."""


_InPython: Any = pickle._Unpickler  # whose instructions can be replaced


class _Unpickler(_InPython):
    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _UnknownClassError(f"{module}.{name}"[:200])
        return dtype

    def load_build(self) -> None:
        """Give an object its state; a class or function would keep it for the whole process."""
        target = self.stack[-2]
        if not isinstance(target, _STATEFUL):
            raise pickle.UnpicklingError("it gives a state to what is no description")
        if isinstance(target, TensorProperties):
            # Torch 2.15 writes strides, too, which older versions cannot take; the dtype counts.
            target.dtype = self.stack.pop()[0]
        else:
            super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(file: Path, *, trust: bool) -> Metadata:
    """Read the metadata in `file`.

    Args:
        file: a `.metadata`.
        trust: unpickle any class, which may run code. Otherwise only torch's own descriptions of
            tensors, chunks and files.

    Raises:
        CheckpointError: it is damaged, holds something else, or names a class that a checkpoint
            does not need.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        metadata = pickle.loads(raw) if trust else _Unpickler(io.BytesIO(raw)).load()
    except _UnknownClassError as error:
        raise CheckpointError(
            f"{file} names {error}, which the description of a checkpoint does not need and which "
            "may run code; pass trust=True if you trust whoever wrote it"
        ) from None
    except Exception as error:  # whatever unpickling damaged bytes raises
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} is damaged (it holds a {type(metadata).__name__})")
    return metadata


def check_metadata(
    folder: Path, metadata: Metadata, paths: Mapping[str, tuple[str, ...]], *, trust: bool
) -> list[str]:
    """Check that the chunks of each tensor fill it once, and lie in files of `folder`.

    Args:
        folder: the directory of the checkpoint.
        metadata: as read from it.
        paths: the path of each entry in the nested dict that was saved.
        trust: allow files that were transformed, such as compressed ones.

    Returns:
        The names of the data files.

    Raises:
        CheckpointError: names the entry at fault.
    """
    sizes: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        key, name = index.fqn, place.relative_path
        if name not in sizes:
            sizes[name] = _size_within(folder, name, key)
        end = place.offset + place.length
        if place.offset < 0 or place.length < 0 or end > sizes[name]:
            raise CheckpointError(
                f"{folder / name} is cut off: {shown(key)} ends at byte {end} and the file at "
                f"{sizes[name]}"
            )
        if not trust and getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{folder / name} is compressed or transformed, so its size says nothing on that "
                f"of {shown(key)}; pass trust=True if you trust whoever wrote it"
            )
    for key, entry in metadata.state_dict_metadata.items():
        if ".".join(paths[key]) != key:
            raise _damaged(folder, f"{shown(key)} has the path {shown('.'.join(paths[key]))}")
        held = _held(folder, metadata, key, entry)
        if isinstance(entry, TensorStorageMetadata) and not trust:
            size = prod(entry.size) * entry.properties.dtype.itemsize
            if size > held:  # memory for it would be taken before the bytes are read
                raise _damaged(folder, f"{shown(key)} has {size} bytes and lies in {held}")
    return list(sizes)


def _held(folder: Path, metadata: Metadata, key: str, entry: Any) -> int:
    """Bytes of the files in which the entry `key` lies."""
    indices = [MetadataIndex(key)]
    if isinstance(entry, TensorStorageMetadata):
        _check_chunks(folder, key, entry)
        indices = [MetadataIndex(key, c.offsets) for c in entry.chunks if prod(c.sizes)]
    for index in indices:
        if index not in metadata.storage_data:
            where = f" at {list(index.offset)}" if index.offset else ""
            raise _damaged(folder, f"{shown(key)}{where} lies in no file")
    return sum(metadata.storage_data[index].length for index in indices)


def _damaged(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{folder / '.metadata'} is damaged: {fault}; load another checkpoint")


def _size_within(folder: Path, name: str, key: str) -> int:
    """Bytes of the file `name` of `folder`, in which the entry `key` lies."""
    if not is_inside(folder, name):
        raise CheckpointError(
            f"{folder / '.metadata'} places {shown(key)} in {shown(name).strip(chr(39))}, outside "
            "the directory; a checkpoint holds all its files"
        )
    file = folder / name
    try:
        if file.is_file():
            return file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    raise CheckpointError(f"{file} is missing; {shown(key)} lies in it")


def _check_chunks(folder: Path, key: str, entry: TensorStorageMetadata) -> None:
    """Check that the chunks fill the tensor once: memory that none fills would keep any values."""
    shape = tuple(entry.size)
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise _damaged(folder, f"{shown(key)} has no dtype")
    for chunk in entry.chunks:
        dims = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(start < 0 or size < 0 or start + size > whole for start, size, whole in dims):
            raise _damaged(
                folder,
                f"rows of {shown(key)} at {list(chunk.offsets)} of shape {list(chunk.sizes)} lie "
                f"outside of {list(shape)}",
            )
    chunks = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape) or _overlap(chunks):
        raise _damaged(folder, f"the chunks of {shown(key)} do not fill {list(shape)} once")


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two of the chunks share an element."""
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    before: list[ChunkStorageMetadata] = []  # those that reach to where the next one starts
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        before = [each for each in before if each.offsets[along] + each.sizes[along] > start]
        for other in before:
            boxes = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in boxes):
                return True
        before.append(chunk)
    return False
