"""Files of `torch.save`, read by `torch.load(weights_only=True)`, and what that does not check.

Such a file is a zip archive with a pickle and one record for each storage. `torch.load` compares no
CRC-32, and believes the pickle about the size of a record, so that it may read beyond its memory.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_BLOCK = 1 << 20


class ArchiveError(ValueError):
    """The bytes are no archive of `torch.save`, or a damaged one."""


class ForeignError(ArchiveError):
    """The archive names a class or function that is neither a tensor nor plain data."""


def load_file(file: Path) -> Any:
    """Return what `torch.save` wrote to a file: plain data, and tensors that are mapped, not read.

    A `ForeignError` says that it holds something else, which only code could restore.
    """
    with file.open("rb") as stream:
        return _load(stream, file, mmap=True)


def load_part(stream: IO[bytes], start: int, length: int) -> Any:
    """Return what `torch.save` wrote to a part of an open file; see `load_file`."""
    part = _Part(stream, start, length)
    return _load(part, part, mmap=False)


def _load(stream: Any, source: Any, *, mmap: bool) -> Any:
    """Check the archive in `stream`, then load it from `source`, the same bytes."""
    try:
        records = _checked_records(stream)
        stream.seek(0)
        # Torch refuses frozensets unless the user has allowed them.
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([] if frozenset in allowed else [frozenset]):
            value = torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ForeignError(str(error).rpartition("WeightsUnpickler error: ")[2]) from error
    except ArchiveError:
        raise
    except Exception as error:  # whatever zipfile and torch raise for damaged bytes
        raise ArchiveError(f"{type(error).__name__}: {error}") from error
    _require_whole(value, records)
    return value


def _checked_records(stream: IO[bytes]) -> Counter[int]:
    """How many records the archive has of each size in bytes; checks all their CRC-32."""
    with zipfile.ZipFile(stream) as archive:
        infos = archive.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED:
                raise ArchiveError("it has a compressed record, which torch.save does not write")
            if info.CRC == 0:  # torch was told to leave it out
                info.CRC = None  # type: ignore[assignment]
            with archive.open(info) as record:
                while record.read(_BLOCK):
                    pass
    return Counter(info.file_size for info in infos)


def _require_whole(value: Any, records: Counter[int]) -> None:
    """Check that no storage of `value` is larger than the record it was read from.

    The memory of one that is must not be read.
    """
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in pytree.tree_leaves(value)
        if type(leaf) in (Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
    }
    more = Counter(size for size in storages.values() if size) - records
    if more:
        raise ArchiveError(f"a tensor has {max(more)} bytes, and no record of that size is left")


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length = stream, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = (0, self._at, self._length)[whence] + offset
        if at < 0:
            raise ValueError("a position before the start")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._start + self._at)
        room = max(0, self._length - self._at)
        count: int = self._stream.readinto(view[:room])  # type: ignore[attr-defined]
        self._at += count
        return count
