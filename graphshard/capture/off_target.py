"""Operators that CUDA would run, where a program for CUDA is traced on the CPU.

The CPU's fused attention has no dropout, so torch takes such attention apart into matrices of the
length squared, which CUDA's kernels never make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphshard.torch_private import trace as torch_trace

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default

_LARGEST_HEAD = 256
"""The size of a head up to which CUDA takes flash attention."""


@contextlib.contextmanager
def attention_of_cuda() -> Iterator[None]:
    """Trace attention with dropout as the fused operator that CUDA takes."""
    with torch_trace.tracing_rules({_SDPA: _attention}):
        yield


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Run `aten.scaled_dot_product_attention`, with dropout in the kernel."""
    fused = _fused(*args, **kwargs)
    return torch_trace.by_own_kernel(_SDPA, *args, **kwargs) if fused is None else fused


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The result of CUDA's flash or memory-efficient attention; None if neither takes this."""
    heads = {tensor.shape[-1] for tensor in (query, key, value)}
    if not dropout_p or query.dim() != 4 or len(heads) != 1:
        return None
    head, bits = heads.pop(), 8 * query.dtype.itemsize
    if bits not in (16, 32) or not query.dtype.is_floating_point or head % (128 // bits):
        return None
    options = (dropout_p, is_causal)
    if bits == 16 and attn_mask is None and head <= _LARGEST_HEAD:
        return _FLASH(query, key, value, *options, scale=scale)[0]
    if enable_gqa:
        return None
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return _EFFICIENT(query, key, value, bias, saves, *options, scale=scale)[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the products of `query` and `key`, of a mask that may hold bools."""
    if mask.dtype == torch.bool:
        blocked = torch.zeros((), dtype=query.dtype, device=mask.device).expand(mask.shape)
        mask = blocked.masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
