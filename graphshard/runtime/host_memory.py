"""Memory on the host for the shards of offloaded parameters: slabs, cut into storages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphshard.planning.slabs import pack


def host_memory(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Uninitialised memory for tensors of these bytes, in slabs (see `graphshard.planning.slabs`).

    Each has a storage of its own, so that saving or copying one does not take its slab with it. A
    slab lives as long as one of them.

    Returns:
        By tensor, uint8 `(bytes,)`.
    """
    slabs = pack(sizes)
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in slabs.sizes]
    return [
        _piece(blocks[slab], start, size) if size else torch.empty(0, dtype=torch.uint8)
        for size, (slab, start) in zip(sizes, slabs.places, strict=True)
    ]


def _piece(block: Tensor, start: int, size: int) -> Tensor:
    memory: Any = (ctypes.c_ubyte * size).from_address(block.data_ptr() + start)
    memory.block = block  # torch keeps `memory` as long as the storage
    return torch.frombuffer(memory, dtype=torch.uint8)
