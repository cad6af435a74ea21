"""The Python standard library's own source as bytes to train on; nothing is downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def load() -> tuple[Tensor, Tensor]:
    """All .py files of this interpreter's standard library, as two uint8 tensors.

    Returns `(training, held_out)`: every twentieth file, in sorted order, is held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test"} & set(p.parts))
    split: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for index, path in enumerate(files):
        split[index % 20 == 19].extend(path.read_bytes())
    return torch.frombuffer(split[0], dtype=torch.uint8), torch.frombuffer(
        split[1], dtype=torch.uint8
    )


def batch(data: Tensor, *, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """`size` random windows of `data`: indices and the bytes after them, int64 `(size, length)`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length, (size, 1), generator=generator)
    window = data[starts + torch.arange(length + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
