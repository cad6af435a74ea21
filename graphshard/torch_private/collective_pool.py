"""Memory pools whose segments NCCL allocates and registers, for torch 2.11 to 2.15."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from graphshard.torch_private.compat import private

Pool = Any
"""A `torch.cuda.MemPool`."""

_NEEDED = {"nccl": (2, 19), "symmetric": (2, 27)}
"""The first version of NCCL that registers memory of each kind."""


def why_no_pool(kind: str) -> str:
    """Why this torch and its NCCL have no pool of this `kind`, "nccl" or "symmetric"; or ""."""
    if not hasattr(torch.cuda, "MemPool"):
        return f"torch {torch.__version__} has no torch.cuda.MemPool"
    backend = _nccl_backend()
    methods = ("register_mem_pool", "deregister_mem_pool", "mem_allocator")
    if missing := [name for name in methods if not hasattr(backend, name)]:
        return f"torch {torch.__version__} has no ProcessGroupNCCL.{missing[0]}"
    version = torch.cuda.nccl.version()
    if version < _NEEDED[kind]:
        needed, found = (".".join(map(str, numbers)) for numbers in (_NEEDED[kind], version))
        return f"it needs NCCL {needed}, and this torch has {found}"
    return ""


def _nccl_backend() -> Any:
    return private("torch.distributed.distributed_c10d", "ProcessGroupNCCL")


class RegisteredPool:
    """A pool for one process group and device.

    Args:
        process_group: with an NCCL backend for the device, whose communicator exists.
        device: a CUDA device.
        symmetric: register segments as symmetric windows, which all ranks of the group do together.
    """

    def __init__(self, process_group: Any, device: torch.device, *, symmetric: bool) -> None:
        self._backend = process_group._get_backend(device)
        self._device = device
        self._symmetric = symmetric
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    def use(self) -> AbstractContextManager[Any]:
        """A context in which this thread allocates from the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def segments(self) -> list[int]:
        """Bytes of each segment."""
        return [segment["total_size"] for segment in self._pool.snapshot(include_traces=False)]

    def register(self) -> None:
        """Register all segments."""
        self._backend.register_mem_pool(self._pool, symm=self._symmetric)

    def deregister(self) -> None:
        """Deregister all segments; a later allocation is not registered either."""
        self._backend.deregister_mem_pool(self._pool)
