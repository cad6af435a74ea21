"""Which tensors of a collective are copied together into one message.

Small tensors cost more by their number than by their bytes; large ones are moved where they lie.
The bounds below were measured, see README.md. torch's "fake" group stands for a group of NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# What every backend can move and, where it is no integer, add up.
MOVABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


GATHER_BELOW = {"gloo": 32 * 1024, "nccl": 64 * 1024, "fake": 64 * 1024}
"""Bytes of a shard below which a gather packs it, by backend."""


REDUCE_BELOW = {"gloo": 128 * 1024, "nccl": 64 * 1024, "fake": 64 * 1024}
"""Bytes of a full gradient below which a reduce packs it, by backend."""


def packed(sizes: Sequence[int], dtypes: Sequence[torch.dtype], below: int) -> list[list[int]]:
    """Indices of the tensors, of these sizes in bytes, that travel together: a list per dtype.

    Only what is below `below` bytes does, if there are two of a dtype, and any backend moves that.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size < below and dtype in MOVABLE:
            by_dtype.setdefault(dtype, []).append(index)
    return [indices for indices in by_dtype.values() if len(indices) > 1]
