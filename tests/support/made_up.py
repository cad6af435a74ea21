"""The CUDA runtime made of CPU threads, tests/cuda_on_cpu, as tests see it."""

from __future__ import annotations

import torch


def is_made_up() -> bool:
    """Whether CUDA's device is the one made of CPU threads."""
    return torch.cuda.is_available() and "CPU threads" in torch.cuda.get_device_name()
