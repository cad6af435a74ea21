"""Read and write the safetensors file format piece by piece.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from graphshard.errors import CheckpointError
from graphshard.plain_data import from_json, shown

Region = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop per dim."""


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

    Args:
        file: the path of the file.
        tensors: shape and dtype of each tensor by name, in the order to write.
    """

    def __init__(
        self, file: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ) -> None:
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
