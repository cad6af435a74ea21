"""Files of `torch.save` as data: tensors and plain values, without `torch.load`.

Such a file is a zip archive with a pickle (`data.pkl`) and one record for each storage. Every size
in the pickle is checked against its record before memory is taken, and every record against its
CRC-32, which `torch.load` does not do. A CRC-32 of 0 means that the writer left it out.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from graphshard.state.plain_pickle import Made, Name, PickleError, Reference, read_pickle
from graphshard.state.raw import memory_of

_DEPTH = 64


_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}


class ArchiveError(ValueError):
    """The bytes are no archive of `torch.save`, or a damaged one."""


class ForeignError(ArchiveError):
    """The archive names a class or function that is neither a tensor nor plain data."""


def dtype_named(name: object) -> torch.dtype | None:
    """The dtype that a `Name` of a pickle stands for; None if it is something else."""
    if not isinstance(name, Name) or name.module != "torch":
        return None
    value = vars(torch).get(name.name)
    return value if isinstance(value, torch.dtype) else None


class Archive:
    """An archive of `torch.save` in a part of a file.

    Args:
        stream: the open file, which is read on demand.
        start: the first byte of the archive.
        length: of the archive in bytes.
    """

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        try:
            with zipfile.ZipFile(_Part(stream, start, length)) as archive:
                infos = archive.infolist()
        except Exception as error:  # whatever zipfile raises for damaged bytes
            raise ArchiveError(f"no archive of torch.save ({type(error).__name__})") from error
        self._storages: dict[str, Tensor] = {}
        self._infos = {info.filename: info for info in infos}
        if len(self._infos) < len(infos):
            raise ArchiveError("the archive has two records of one name")
        pickles = [name for name in self._infos if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ArchiveError("no archive of torch.save: it has no data.pkl")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in self._infos and self._bytes("byteorder") != b"little":
            raise ArchiveError("the archive was not written by a little-endian machine")
        raw = self._bytes("data.pkl")
        try:
            self._root = read_pickle(raw)
        except PickleError as error:
            raise ArchiveError(str(error)) from error
        self._values_left = 16 * len(raw)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the one tensor that was saved."""
        if not _calls(self._root, "torch._utils", "_rebuild_tensor"):
            raise ArchiveError("the archive holds no tensor")
        tensor = self._tensor(self._root)
        if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
            raise ArchiveError(
                f"the archive holds a tensor of {tensor.dtype} {list(tensor.shape)}, and "
                f"{dtype} {list(shape)} is said to lie there"
            )
        return tensor

    def value(self) -> Any:
        """Return what was saved: tensors and plain data."""
        try:
            return self._plain(self._root, 0)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if isinstance(error, ArchiveError):
                raise
            raise ArchiveError(f"a value is damaged ({type(error).__name__})") from error

    def check(self) -> None:
        """Check every record, and every tensor against its record, whatever else was saved.

        After this `torch.load(weights_only=True)` reads no byte outside of a record.
        """
        for name in self._infos:
            if not name.startswith(self._prefix):
                raise ArchiveError("the archive has a record outside of its folder")
            self._record(name.removeprefix(self._prefix))
        seen: set[int] = set()
        pending: list[Any] = [self._root]
        while pending:
            value = pending.pop()
            if id(value) in seen or isinstance(value, str | int | float | bytes | None):
                continue
            seen.add(id(value))
            if isinstance(value, Reference):
                raise ForeignError("a storage without a tensor")
            if isinstance(value, Made):
                args = value.args
                if _calls(value, "torch._utils", "_rebuild_tensor"):
                    self._place(value)
                    args = args[1:]
                pending += [*args, value.state, *(part for pair in value.pairs for part in pair)]
            elif isinstance(value, dict):
                pending += [*value, *value.values()]
            elif isinstance(value, list | tuple | set):
                pending += value

    # -- records ---------------------------------------------------------------------------------

    def _bytes(self, name: str) -> bytes:
        """The bytes of a record, checked."""
        return self._record(name).numpy().tobytes()

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._infos.get(f"{self._prefix}{name}")
        if info is None:
            raise ArchiveError(f"the archive has no record {name[:80]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ArchiveError(f"the record {name[:80]!r} is compressed or encrypted")
        if info.file_size > self._length:
            raise ArchiveError(f"the record {name[:80]!r} is cut off")
        return info

    def _record(self, name: str) -> Tensor:
        info = self._info(name)
        self._stream.seek(self._start + info.header_offset)
        head = self._stream.read(30)
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise ArchiveError(f"the record {name[:80]!r} has no header")
        named, extra = struct.unpack("<HH", head[26:30])
        first = info.header_offset + 30 + named + extra
        if first + info.file_size > self._length:
            raise ArchiveError(f"the record {name[:80]!r} is cut off")
        storage = torch.empty(info.file_size, dtype=torch.uint8)
        if not info.file_size:
            return storage
        self._stream.seek(self._start + first)
        memory = memory_of(storage)
        if self._stream.readinto(memory) != info.file_size:  # type: ignore[attr-defined]
            raise ArchiveError(f"the record {name[:80]!r} is cut off")
        if info.CRC and zlib.crc32(memory) != info.CRC:
            raise ArchiveError(f"the record {name[:80]!r} has another CRC-32 than was saved")
        return storage

    # -- values ----------------------------------------------------------------------------------

    def _plain(self, value: Any, depth: int) -> Any:
        self._values_left -= 1
        if depth > _DEPTH or self._values_left < 0:
            raise ArchiveError("its values nest too deep, or repeat each other too often")
        depth += 1
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        if isinstance(value, dict):
            return {self._plain(k, depth): self._plain(v, depth) for k, v in value.items()}
        if isinstance(value, list | tuple | set):
            return type(value)(self._plain(inner, depth) for inner in value)
        if isinstance(value, Made):
            return self._object(value, depth)
        dtype = dtype_named(value)
        if dtype is None:
            raise ForeignError(str(value) if isinstance(value, Name) else "a reference")
        return dtype

    def _object(self, made: Made, depth: int) -> Any:
        if _calls(made, "torch._utils", "_rebuild_"):
            return self._tensor(made)
        make = _PLAIN.get((made.name.module, made.name.name))
        if make is None:
            raise ForeignError(str(made.name))
        value = make(*(self._plain(arg, depth) for arg in made.args))
        for key, inner in made.pairs:
            value[self._plain(key, depth)] = self._plain(inner, depth)
        return value

    def _tensor(self, made: Made) -> Tensor:
        name, args = made.name.name, made.args
        if name == "_rebuild_parameter" and args and isinstance(args[0], Made):
            if not _calls(args[0], "torch._utils", "_rebuild_tensor"):
                raise ForeignError(str(args[0].name))
            return self._tensor(args[0])
        place = self._place(made)
        if prod(place.size) == 0:
            return torch.empty(place.size, dtype=place.dtype)
        if place.record not in self._storages:
            self._storages[place.record] = self._record(place.record)
        storage = self._storages[place.record]
        if place.dtype is torch.bool and storage.max() > 1:
            raise ArchiveError("a tensor has a bool whose byte is neither 0 nor 1")
        return torch.as_strided(storage.view(place.dtype), place.size, place.stride, place.offset)

    def _place(self, made: Made) -> _Place:
        """The place of a tensor in its record, checked."""
        name, args = made.name.name, made.args
        if name not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3") or made.state is not None:
            raise ForeignError(str(made.name))
        v3 = name.endswith("3")
        if not 6 + v3 <= len(args) <= 7 + v3 or (len(args) == 7 + v3 and args[-1]):
            raise ArchiveError("a tensor is damaged, or a lazy conjugate")
        record, dtype, held = self._storage_of(args[0])
        if v3:
            dtype = dtype_named(args[6]) or dtype
        if held % dtype.itemsize:
            raise ArchiveError("a tensor's record has no whole number of elements")
        offset, size, stride = args[1:4]
        _check_strides(offset, size, stride, held // dtype.itemsize)
        return _Place(record, dtype, offset, size, stride)

    def _storage_of(self, reference: Any) -> tuple[str, torch.dtype, int]:
        """The record of a storage, the dtype that the pickle gives it, and its bytes."""
        match reference:
            case Reference(id=("storage", Name() as kind, str() as key, str(), int() as count)):
                dtype = _DTYPES.get(kind.name) if kind.module.startswith("torch") else None
                if dtype is None:
                    raise ForeignError(str(kind))
                record = f"data/{key}"
                held = self._info(record).file_size
                if count * dtype.itemsize != held:
                    raise ArchiveError(
                        f"a tensor's record has {held} bytes, and {count} elements of {dtype} are "
                        "said to lie there"
                    )
                return record, dtype, held
        raise ArchiveError("a tensor has no storage")


class _Place(NamedTuple):
    """A tensor in a record; offset, size and stride in elements."""

    record: str
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


_PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "Counter"): Counter,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): lambda text, coding: text.encode("latin1"),
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    **{(module, "frozenset"): frozenset for module in ("builtins", "__builtin__")},
    **{(module, "bytearray"): bytearray for module in ("builtins", "__builtin__")},
    **{(module, "complex"): complex for module in ("builtins", "__builtin__")},
}


def _calls(value: Any, module: str, start: str) -> bool:
    """Whether a function of `module` whose name begins with `start` made `value`."""
    named = value.name if isinstance(value, Made) else None
    return named is not None and named.module == module and named.name.startswith(start)


def _check_strides(offset: Any, size: Any, stride: Any, count: int) -> None:
    """Check that a tensor lies inside its record of `count` elements, and repeats none."""
    fine = all(isinstance(part, tuple) and all(map(_is_size, part)) for part in (size, stride))
    if not fine or not _is_size(offset) or len(size) != len(stride) or len(size) > _DEPTH:
        raise ArchiveError("a tensor is damaged: its sizes are no numbers of elements")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if prod(size) > count or (prod(size) and last >= count) or max((0, *size)) > 1 << 40:
        raise ArchiveError(
            f"a tensor of shape {list(size)} does not fit its record of {count} elements"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length = stream, start, length
        self._at = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position, from the start of the part."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to `offset` bytes after the start, the position or the end."""
        at = (0, self._at, self._length)[whence] + offset
        if at < 0:
            raise ValueError("a position before the start")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the part reaches; return the number of bytes."""
        count = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._start + self._at)
        raw = self._stream.read(count)
        buffer[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)
