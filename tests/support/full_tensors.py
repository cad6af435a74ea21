"""Whole tensors of parameters and gradients, sharded or not."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered if it is a DTensor, without its autograd history."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_grads(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole gradients by parameter name; parameters without one are left out."""
    named = module.named_parameters()
    return {name: full(param.grad).clone() for name, param in named if param.grad is not None}
