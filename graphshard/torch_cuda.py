"""The part of `graphshard.torch_compat` that touches CUDA, for torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

import torch

from graphshard.torch_compat import private


def end_allocation(pool: Any) -> None:
    """Let the allocator of the current device take memory from `pool`, a graph's, no longer."""
    private("torch._C", "_cuda_endAllocateToPool")(torch.cuda.current_device(), pool)
