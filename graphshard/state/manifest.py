"""The manifest of a checkpoint: its id, and the size and CRC-32 of every file; see README.md."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from graphshard.errors import CheckpointError
from graphshard.plain_data import from_json, read_file, shown

METADATA = ".metadata"
"""The file of a torch.distributed checkpoint that names all others."""


_FORMAT = "graphshard checkpoint 1"


_ID = "[0-9a-f]{16}"


_DATA_FILE = re.compile(rf"__\d+_({_ID})_\d+\.distcp")


_MANIFEST = re.compile(rf"graphshard\.({_ID})\.json")


_UNFINISHED = re.compile(rf"\.metadata\.({_ID})\.tmp")


_TORCH_DATA_FILE = re.compile(r"__\d+()_\d+\.distcp")


_BLOCK = 1 << 22


_MOST_BYTES = 1 << 28
"""Of a manifest; a file takes about 60."""


def new_id() -> str:
    """A random id of a save: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def data_prefix(rank: int, save_id: str) -> str:
    """The beginning of the names of the data files that `rank` writes."""
    return f"__{rank}_{save_id}_"


def save_id_of(file: str) -> str | None:
    """The id of the save that wrote the data file of this name; None if graphshard did not."""
    match = _DATA_FILE.fullmatch(file)
    return match[1] if match else None


@dataclass(frozen=True)
class FileRecord:
    """The size of a file in bytes, and the CRC-32 of its contents."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """The record of a file on disk."""
        crc = size = 0
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(_BLOCK):
                crc = zlib.crc32(block, crc)
                size += len(block)
        return cls(size, crc)


@dataclass(frozen=True)
class Manifest:
    """The files of one save by name, `.metadata` included, and when it was committed.

    `written` is in nanoseconds since 1970.
    """

    save_id: str
    written: int
    files: Mapping[str, FileRecord]

    @property
    def name(self) -> str:
        """The name of the manifest's own file."""
        return f"graphshard.{self.save_id}.json"

    def to_bytes(self) -> bytes:
        """One line of JSON, and a line with its CRC-32."""
        data = {
            "format": _FORMAT,
            "id": self.save_id,
            "written": self.written,
            "files": {name: [r.bytes, f"{r.crc32:08x}"] for name, r in self.files.items()},
        }
        text = json.dumps(data).encode()
        return text + f"\n{zlib.crc32(text):08x}\n".encode()

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a manifest."""
        try:
            raw = read_file(file, "the manifest", CheckpointError, _MOST_BYTES)
            data: dict[str, Any] = from_json(raw.partition(b"\n")[0])
            files = {
                name: FileRecord(size, int(crc, 16)) for name, (size, crc) in data["files"].items()
            }
            manifest = cls(data["id"], data["written"], files)
            if not isinstance(manifest.written, int):
                raise ValueError("it was written at no time")
            for name in files:
                if name != METADATA and save_id_of(name) != manifest.save_id:
                    raise ValueError(f"it names the file {shown(name)}")
            if data["format"] != _FORMAT or raw != manifest.to_bytes():
                raise ValueError("its checksum differs")
        except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            raise CheckpointError(
                f"{file} is missing or damaged ({type(error).__name__}: {error}); the files beside "
                "it cannot be checked without it, so load another checkpoint"
            ) from error
        return manifest

    def verify(self, folder: Path, names: Collection[str]) -> None:
        """Compare files in `folder` with their records."""
        for name in names:
            recorded = self.files[name]
            try:
                actual = FileRecord.of(folder / name)
            except OSError as error:
                raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
            if actual != recorded:
                raise CheckpointError(
                    f"{folder / name} is damaged: it has {actual.bytes} bytes with CRC-32 "
                    f"{actual.crc32:08x}, and {recorded.bytes} bytes with {recorded.crc32:08x} "
                    "were saved; load another checkpoint"
                )


def manifest_of(folder: Path, data_files: Collection[str]) -> Manifest | None:
    """The manifest of the checkpoint in `folder` whose metadata names `data_files`.

    None if graphshard did not write it.
    """
    ids = {save_id_of(name) for name in data_files}
    if ids <= {None}:
        return None
    if len(ids) > 1:
        raise CheckpointError(f"{folder} mixes files of several saves; load another checkpoint")
    (save_id,) = ids
    manifest = Manifest.read(folder / f"graphshard.{save_id}.json")
    missing = {*data_files, METADATA} - set(manifest.files)
    if missing or manifest.save_id != save_id:
        raise CheckpointError(f"{folder / manifest.name} is that of another checkpoint")
    return manifest


def commit(folder: Path, save_id: str, metadata: bytes, files: Mapping[str, FileRecord]) -> None:
    """Make the data files in `folder`, which are on disk, its checkpoint.

    Those of earlier ones stay; see `remove_replaced`. `metadata` is the contents of `.metadata`.
    """
    temporary = folder / f"{METADATA}.{save_id}.tmp"
    record = FileRecord(len(metadata), zlib.crc32(metadata))
    manifest = Manifest(save_id, time.time_ns(), {**files, METADATA: record})
    try:
        _write(folder / manifest.name, manifest.to_bytes())
        _write(temporary, metadata)
        sync_folder(folder)
        temporary.replace(folder / METADATA)
    except BaseException:
        discard(folder, save_id)
        raise
    sync_folder(folder)


def remove_replaced(folder: Path, save_id: str, rank: int, ranks: int) -> None:
    """Remove this rank's share of the files that a save replaced; called once it committed.

    A file system frees about 3 GiB a second for one caller, so that one rank alone would take long
    for the files of many. The earlier save may have had another number of ranks.
    """
    for file in _listed(folder):
        if _id_of(file.name) in (None, save_id):
            continue
        writer = re.match(r"__(\d+)_", file.name)
        if (int(writer[1]) if writer else 0) % ranks == rank:
            with suppress(OSError):
                file.unlink()


def discard(folder: Path, save_id: str, rank: int | None = None) -> None:
    """Remove the files in `folder` of a save that failed; of all ranks, or of one."""
    for file in _listed(folder):
        own = rank is None or file.name.startswith(data_prefix(rank, save_id))
        if own and _id_of(file.name) == save_id:
            with suppress(OSError):
                file.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _id_of(name: str) -> str | None:
    """The id of the save that the file of this name is of, "" of one by torch; else None."""
    for pattern in (_DATA_FILE, _MANIFEST, _UNFINISHED, _TORCH_DATA_FILE):
        if match := pattern.fullmatch(name):
            return match[1]
    return None


# -- several checkpoints --------------------------------------------------------------------------


def committed(folder: Path) -> list[tuple[Manifest, Path]]:
    """The checkpoints directly below `folder` that graphshard wrote, the oldest first."""
    checkpoints = []
    for child in _listed(folder):
        if not (child / METADATA).is_file():
            continue
        for file in _listed(child):
            if _MANIFEST.fullmatch(file.name):
                with suppress(CheckpointError):
                    manifest = Manifest.read(file)
                    if _is_current(manifest, child):
                        checkpoints.append((manifest, child))
    return sorted(checkpoints, key=lambda entry: entry[0].written)


def _is_current(manifest: Manifest, folder: Path) -> bool:
    """Whether `.metadata` is that of `manifest`, and each of its files has its size."""
    try:
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
        metadata = FileRecord.of(folder / METADATA)
    except OSError:
        return False
    return metadata == manifest.files[METADATA] and all(
        size == manifest.files[name].bytes for name, size in sizes.items()
    )


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint directly below `folder` that `save_checkpoint` committed last.

    A save that did not end, or whose files are missing or cut off, does not count. None if there is
    no checkpoint.
    """
    checkpoints = committed(Path(folder))
    return checkpoints[-1][1] if checkpoints else None


def series_of(path: Path) -> str:
    """The name of `path` with a mark for its last number: checkpoints of a run share it."""
    match = re.fullmatch(r"(.*?)\d+(\D*)", path.name)
    if match is None:
        raise CheckpointError(
            f"keep= removes earlier checkpoints of the same run, which differ from {path} in the "
            'last number of their name; there is none: name it like "step-1000"'
        )
    return f"{match[1]}#{match[2]}"


def remove_earlier(path: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints of the run that `path` belongs to."""
    series = series_of(path)
    numbered = [
        child
        for _, child in committed(path.parent)
        if re.search(r"\d", child.name) and series_of(child) == series
    ]
    for folder in numbered[:-keep]:
        manifests = [file for file in _listed(folder) if _id_of(file.name)]
        # Without `.metadata` there is no checkpoint, whatever else is still there.
        for file in (folder / METADATA, *manifests):
            with suppress(OSError):
                file.unlink()
        with suppress(OSError):
            folder.rmdir()
