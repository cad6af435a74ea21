"""Torch's private API for what its CUDA allocator did: settings, history and snapshot."""

from __future__ import annotations

from typing import Any

import torch

from graphshard.torch_private.compat import private

_MODULE = "torch.cuda.memory"

ENTRIES = 2_000_000
"""Requests and returns that a history holds; older ones are lost."""


def use_settings(text: str) -> None:
    """Set what PYTORCH_CUDA_ALLOC_CONF would have, before anything is allocated."""
    private(_MODULE, "_set_allocator_settings")(text)


def record_history() -> None:
    """Begin to record every request to the allocator, without stacks."""
    record = private(_MODULE, "_record_memory_history")
    record(enabled="all", context=None, max_entries=ENTRIES)


def history(device: int) -> list[dict[str, Any]]:
    """What the allocator of the CUDA device with this index did since `record_history`, in order.

    Each entry has `action`, `addr`, `size` and `stream`.
    """
    torch.cuda.synchronize(device)
    traces = private(_MODULE, "_snapshot")()["device_traces"]
    return list(traces[device]) if device < len(traces) else []
