"""Read `.metadata` of a checkpoint of torch.distributed, a pickle, without running its code."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from graphshard.errors import CheckpointError
from graphshard.plain_data import shown
from graphshard.state.archive import dtype_named
from graphshard.state.plain_pickle import Made, Name, PickleError, read_pickle

_MOST_BYTES = 1 << 32


class _UnknownClassError(Exception):
    """The pickle names something else."""


def read_metadata(file: Path, *, trust: bool) -> Metadata:
    """Read the metadata in `file`.

    Args:
        file: a `.metadata`.
        trust: unpickle any class, which may run code. Otherwise none is unpickled: the descriptions
            of tensors, chunks and files are built from the pickle's plain data.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{file} is damaged (it is longer than {_MOST_BYTES} bytes)")
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        metadata = pickle.loads(raw) if trust else _metadata(read_pickle(raw))
    except _UnknownClassError as error:
        raise CheckpointError(
            f"{file} names {error}, which the description of a checkpoint does not need and which "
            "may run code; pass trust=True if you trust whoever wrote it"
        ) from None
    except PickleError as error:
        raise CheckpointError(f"{file} is damaged ({error})") from error
    except Exception as error:  # whatever unpickling damaged bytes raises
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} is damaged (it holds a {type(metadata).__name__})")
    return metadata


_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"


def _metadata(value: Any) -> Metadata:
    state = _state(value, _DESCRIPTIONS, "Metadata")
    entries = {
        _text(key): _entry(key, entry) for key, entry in _dict(state, "state_dict_metadata").items()
    }
    records = _dict(state, "storage_data")
    places = {_index(index): _place(place) for index, place in records.items()}
    if len(places) < len(records):
        raise PickleError("a chunk has two places")
    version = state.get("version")
    return Metadata(
        state_dict_metadata=entries,
        planner_data=_paths(state.get("planner_data")),
        storage_data=places,
        version=version if isinstance(version, str) else None,
    )


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    if not isinstance(value, dict):
        return None
    paths = {}
    for key, path in value.items():
        if not isinstance(path, tuple | list) or not path:
            _refuse(path, f"the path of {shown(key)}")
        for name in path:
            if not isinstance(name, str | int):
                _refuse(name, f"the path of {shown(key)}")
        paths[_text(key)] = tuple(path)
    return paths


def _entry(key: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(value, _DESCRIPTIONS, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    state = _state(value, _DESCRIPTIONS, "TensorStorageMetadata")
    properties = _made(state.get("properties"), _DESCRIPTIONS, "TensorProperties").state
    if not isinstance(properties, tuple) or len(properties) not in (5, 6):
        raise PickleError(f"{shown(key)} has no dtype")
    if len(properties) == 6 and properties[5] is not None:  # strides as it was saved, in new torch
        _size(properties[5], key)
    dtype = dtype_named(properties[0])
    if dtype is None:
        _refuse(properties[0], f"the dtype of {shown(key)}")
    layout = properties[1]
    if not _is(layout, "torch.serialization", "_get_layout") or layout.args != ("torch.strided",):
        _refuse(layout, f"the layout of {shown(key)}")
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(state.get("size"), key),
        _chunks(state.get("chunks"), key),
    )


def _chunks(value: Any, key: str) -> list[ChunkStorageMetadata]:
    if not isinstance(value, list):
        raise PickleError(f"{shown(key)} has no chunks")
    chunks = []
    for chunk in value:
        state = _state(chunk, _DESCRIPTIONS, "ChunkStorageMetadata")
        offsets, sizes = (_size(state.get(name), key) for name in ("offsets", "sizes"))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return chunks


def _index(value: Any) -> MetadataIndex:
    state = _state(value, _DESCRIPTIONS, "MetadataIndex")
    key, offset = _text(state.get("fqn")), state.get("offset")
    return MetadataIndex(key, None if offset is None else _size(offset, key))


def _place(value: Any) -> _StorageInfo:
    state = _state(value, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    name, offset, length = (state.get(k) for k in ("relative_path", "offset", "length"))
    transforms = state.get("transform_descriptors")
    if transforms is not None and not (
        isinstance(transforms, list | tuple) and all(isinstance(t, str) for t in transforms)
    ):
        _refuse(transforms, "the transforms of a file")
    if not isinstance(offset, int) or not isinstance(length, int):
        raise PickleError("a place in a file has no offset or length")
    place = _StorageInfo(_text(name), offset, length)
    if transforms:
        place.transform_descriptors = transforms
    return place


# -- parts ----------------------------------------------------------------------------------------


def _is(value: Any, module: str, name: str) -> bool:
    return isinstance(value, Made) and (value.name.module, value.name.name) == (module, name)


def _made(value: Any, module: str, name: str) -> Made:
    if not _is(value, module, name):
        _refuse(value, f"a {name}")
    assert isinstance(value, Made)
    return value


def _state(value: Any, module: str, name: str) -> Mapping[str, Any]:
    state = _made(value, module, name).state
    if not isinstance(state, dict):
        raise PickleError(f"a {name} has no fields")
    return state


def _refuse(value: Any, expected: str) -> NoReturn:
    named = value.name if isinstance(value, Made) else value
    if isinstance(named, Name):
        raise _UnknownClassError(str(named)[:200])
    raise PickleError(f"{expected} is a {type(value).__name__}")


def _dict(state: Mapping[str, Any], field: str) -> dict[Any, Any]:
    value = state.get(field)
    if not isinstance(value, dict):
        _refuse(value, field)
    assert isinstance(value, dict)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _refuse(value, "a name")
    assert isinstance(value, str)
    return value


def _size(value: Any, key: str) -> torch.Size:
    sizes = value
    if isinstance(value, Made):
        sizes = _made(value, "torch", "Size").args[0] if len(value.args) == 1 else None
        _made(value, "torch", "Size")
    if not isinstance(sizes, tuple | list) or len(sizes) > 64:
        raise PickleError(f"a size of {shown(key)} is a {type(sizes).__name__}")
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 62:
            raise PickleError(f"a size of {shown(key)} is no number of elements")
    return torch.Size(sizes)
