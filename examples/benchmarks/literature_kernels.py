"""Kernels of the published runs that do several operators in one, as operators of their own.

Each stands for a kernel of flash-attn, xformers or Triton: an operator that reads its operands and
writes its results once, which is what a simulation counts. Where they run at all, they compute the
same in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NAME = "graphshard_literature"


@torch.library.custom_op(f"{_NAME}::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(logits.float(), -1)
    picked = logits.float().gather(-1, labels[:, None])[:, 0]
    return lse - picked, lse


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return rows, torch.empty_like(rows)


@torch.library.custom_op(f"{_NAME}::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    share = torch.exp(logits.float() - lse[:, None])
    hot = F.one_hot(labels, logits.shape[-1])
    return ((share - hot) * grad[:, None]).to(logits.dtype)


@_cross_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _keep_logits(ctx: Any, inputs: Any, output: Any) -> None:
    logits, labels = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _of_logits(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    logits, labels, lse = ctx.saved_tensors
    return _cross_entropy_backward(grad, logits, labels, lse), None


_cross_entropy.register_autograd(_of_logits, setup_context=_keep_logits)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss; the kernel reads logits `(rows, classes)` in their own dtype."""
    losses: Tensor = _cross_entropy(logits, labels)[0]
    return losses.mean()


@torch.library.custom_op(f"{_NAME}::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op(f"{_NAME}::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


@_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


_swiglu.register_autograd(
    lambda ctx, grad: _swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, of the same shape."""
    out: Tensor = _swiglu(gate, up)
    return out


@torch.library.custom_op(f"{_NAME}::rotary", mutates_args=())
def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    return _rotary(grad.contiguous(), cos, -sin), None, None


_rotary.register_autograd(
    _turn_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:])
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `(batch, length, heads, size)` turned by angles `(length, size / 2)`."""
    out: Tensor = _rotary(x, cos, sin)
    return out
