"""The choice of the tensors of a collective that are packed into one message.

The cost of small tensors is their number, not their bytes; large tensors are sent without a copy.
The bounds were measured, see README.md. torch's "fake" group stands for an NCCL group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Dtypes that every backend can gather and, except integers, reduce.
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


REDUCE_BELOW = {"gloo": 64 * 1024, "nccl": 64 * 1024, "fake": 64 * 1024}
"""Bytes of a gradient's shard below which a reduce packs it, by backend."""


def packed(sizes: Sequence[int], dtypes: Sequence[torch.dtype], below: int) -> list[list[int]]:
    """The indices of tensors to pack together: one list for each dtype with two or more.

    Args:
        sizes: bytes of each tensor.
        dtypes: dtype of each tensor; dtypes that some backend cannot move are never packed.
        below: only tensors of fewer bytes are packed.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if size < below and dtype in MOVABLE:
            by_dtype.setdefault(dtype, []).append(index)
    return [indices for indices in by_dtype.values() if len(indices) > 1]
