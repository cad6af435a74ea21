"""Checks of a checkpoint's metadata against itself and the files, before a byte of them is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from graphshard.errors import CheckpointError
from graphshard.plain_data import shown
from graphshard.state.files import is_inside

_PATH = 64
"""The most names of a path."""


_COMPARISONS = 10_000_000
"""Pairs of chunks of a tensor that are compared; real checkpoints need one or two a chunk."""


def check_metadata(
    folder: Path, metadata: Metadata, paths: Mapping[str, tuple[str, ...]], *, trust: bool
) -> dict[str, int]:
    """Check that the chunks of each tensor fill it once, and lie in files of `folder`.

    Args:
        folder: the directory of the checkpoint.
        metadata: as read from it.
        paths: the path of each entry in the nested dict that was saved.
        trust: allow files that were transformed, such as compressed ones.

    Returns:
        Bytes of each data file, by name.
    """
    sizes = _check_places(folder, metadata, trust=trust)
    _check_paths(folder, paths)
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(key) not in metadata.storage_data:
                raise _damaged(folder, f"{shown(key)} lies in no file")
            continue
        _check_chunks(folder, key, entry)
        for chunk in entry.chunks:
            count = prod(chunk.sizes)
            place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            if count and place is None:
                raise _damaged(
                    folder, f"rows of {shown(key)} at {list(chunk.offsets)} lie in no file"
                )
            least = count * entry.properties.dtype.itemsize
            if place is not None and _untransformed(place) and place.length < least:
                raise _damaged(
                    folder,
                    f"rows of {shown(key)} at {list(chunk.offsets)} have {least} bytes and lie in "
                    f"{place.length}",
                )
    return sizes


def _damaged(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{folder / '.metadata'} is damaged: {fault}; load another checkpoint")


def _untransformed(place: Any) -> bool:
    return not getattr(place, "transform_descriptors", None)


def _check_places(folder: Path, metadata: Metadata, *, trust: bool) -> dict[str, int]:
    sizes: dict[str, int] = {}
    ranges: dict[str, list[tuple[int, int, str]]] = {}
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
        if not trust and not _untransformed(place):
            raise CheckpointError(
                f"{folder / name} is compressed or transformed, so its size says nothing on that "
                f"of {shown(key)}; pass trust=True if you trust whoever wrote it"
            )
        ranges.setdefault(name, []).append((place.offset, end, key))
    for name, parts in ranges.items():
        last_end, last_key = 0, ""
        for start, end, key in sorted(parts):
            if start < last_end and start < end:
                raise _damaged(folder, f"{shown(last_key)} and {shown(key)} share bytes of {name}")
            last_end, last_key = max(last_end, end), key
    return sizes


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


def _check_paths(folder: Path, paths: Mapping[str, tuple[str, ...]]) -> None:
    """Check that each key is its path with dots, as torch writes it, and no path inside another."""
    known = set(paths.values())
    for key, path in paths.items():
        if ".".join(path) != key:
            raise _damaged(folder, f"{shown(key)} has the path {shown('.'.join(path))}")
        if len(path) > _PATH:
            raise _damaged(folder, f"{shown(key)} has a path of {len(path)} names")
        for depth in range(1, len(path)):
            if path[:depth] in known:
                raise _damaged(
                    folder, f"{shown(key)} lies inside of {shown('.'.join(path[:depth]))}"
                )


def _check_chunks(folder: Path, key: str, entry: TensorStorageMetadata) -> None:
    shape = tuple(entry.size)
    if prod(max(size, 1) for size in shape) * entry.properties.dtype.itemsize >= 1 << 63:
        raise _damaged(folder, f"{shown(key)} has shape {shown(list(shape))}")
    filled = 0
    chunks = []
    for chunk in entry.chunks:
        parts = (chunk.offsets, chunk.sizes)
        fits = all(len(part) == len(shape) and min((0, *part)) >= 0 for part in parts)
        count = prod(chunk.sizes)
        if not fits or (count and any(o + s > n for o, s, n in zip(*parts, shape, strict=True))):
            raise _damaged(
                folder,
                f"rows of {shown(key)} at {shown(list(chunk.offsets))} of shape "
                f"{shown(list(chunk.sizes))} lie outside of {list(shape)}",
            )
        if count:
            filled += count
            chunks.append(chunk)
    if filled != prod(shape) or _overlap(chunks, len(shape)):
        raise _damaged(folder, f"the chunks of {shown(key)} do not fill {list(shape)} once")


def _overlap(chunks: Sequence[ChunkStorageMetadata], dims: int) -> bool:
    """Whether two of the chunks share an element; True, too, where that takes too long to tell."""
    if len(chunks) < 2:
        return False
    if not dims:
        return True
    along = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    compared = 0
    open_chunks: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        open_chunks = [c for c in open_chunks if c.offsets[along] + c.sizes[along] > start]
        compared += len(open_chunks)
        if compared > _COMPARISONS:
            return True
        for other in open_chunks:
            if all(
                max(a, b) < min(a + n, b + m)
                for a, n, b, m in zip(
                    chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                return True
        open_chunks.append(chunk)
    return False
