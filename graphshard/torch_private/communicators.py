"""The ends of communicators, and the allocator's settings, which CUDA graphs depend on."""

from __future__ import annotations

import os

import torch

from graphshard.errors import UnsupportedTorchError
from graphshard.torch_private.compat import SUPPORTED, private


def ends_of_groups() -> list[tuple[type, str]]:
    """The class of process groups, with each of its methods that end a group's communicators.

    `destroy_process_group` calls one of them.
    """
    found = _methods(private("torch.distributed.distributed_c10d", "ProcessGroup"))
    if not found:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} shuts no process group down from Python, which "
            f"cuda_graph=True and background=True need; use {SUPPORTED}"
        )
    return found


def ends_of_backends() -> list[tuple[type, str]]:
    """The classes of backends, with each of their methods that end a communicator."""
    module = "torch.distributed.distributed_c10d"
    kinds = [private("torch._C._distributed_c10d", "Backend")]
    if private(module, "is_nccl_available")():
        kinds.append(private(module, "ProcessGroupNCCL"))
    return [found for kind in kinds for found in _methods(kind)]


def _methods(kind: type) -> list[tuple[type, str]]:
    return [(kind, name) for name in ("shutdown", "_shutdown", "abort") if name in vars(kind)]


def allocator_settings() -> str:
    """The settings of the CUDA allocator: those of this process, or else of the environment."""
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")()
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return current or ",".join(os.environ.get(name, "") for name in names)
