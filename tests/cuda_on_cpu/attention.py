"""CUDA's fused attention by the CPU's, and by its formula where it drops weights.

The operators differ in their arguments and in what they keep for backward. What is dropped is drawn
again in backward, from a seed that forward keeps where CUDA's kernels keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Seeded = Callable[[], torch.Generator] | None
_aten = torch.ops.aten
_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_ROWS = 32  # to a multiple of which the efficient kernel pads its logarithms


def flash(
    seeded: Seeded,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`_scaled_dot_product_flash_attention`; the tensors of its result."""
    out, lse, seed = _forward(seeded, q, k, v, None, p, causal, scale)
    state = torch.tensor([seed, 0]).to(torch.uint64)
    return out, lse, state, torch.zeros((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    p: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_flash_attention_backward`."""
    if p == 0:
        return _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    seed = int(state.to(torch.int64)[0])
    return _gradients(seed, grad, q, k, v, None, p, causal, scale)[:3]


def efficient(
    seeded: Seeded,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep_lse: bool,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_efficient_attention`."""
    out, lse, seed = _forward(seeded, q, k, v, bias, p, causal, scale)
    rows = math.ceil(q.size(2) / _ROWS) * _ROWS if keep_lse else 0
    padded = lse.new_full((*lse.shape[:2], rows), math.inf)
    if keep_lse:
        padded[..., : q.size(2)] = lse
    return out, padded, torch.tensor(seed), torch.tensor(0)


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    p: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """`_scaled_dot_product_efficient_attention_backward`."""
    if p == 0 and not wanted[3]:
        lse = lse[..., : q.size(2)].contiguous()
        return _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return _gradients(int(seed), grad, q, k, v, bias, p, causal, scale)[: 3 + wanted[3]]


def _forward(
    seeded: Seeded,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, int]:
    if seeded is None:
        return *_CPU(q, k, v, 0.0, causal, attn_mask=bias, scale=scale), 0
    seed = seeded().initial_seed()
    scores = _scores(q, k, bias, causal, scale)
    kept = _kept(seed, scores, p)
    return (scores.softmax(-1) * kept).to(v.dtype) @ v, scores.logsumexp(-1), seed


def _gradients(
    seed: int,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of query, key, value and bias."""
    scores = _scores(q, k, bias, causal, scale)
    weights, kept = scores.softmax(-1), _kept(seed, scores, p)
    of_v = (weights * kept).to(v.dtype).mT @ grad
    of_weights = (grad @ v.mT).float() * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    factor = _scale(q, scale)
    of_q = (of_scores @ k.float() * factor).to(q.dtype)
    of_k = (of_scores.mT @ q.float() * factor).to(k.dtype)
    return of_q, of_k, of_v, of_scores.to(q.dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.size(-1)) if scale is None else scale


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = q.float() @ k.float().mT * _scale(q, scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _kept(seed: int, scores: Tensor, p: float) -> Tensor:
    """By which each weight is multiplied: 0, or more than 1."""
    if p == 0:
        return torch.ones_like(scores)
    generator = torch.Generator().manual_seed(seed)
    return torch.empty_like(scores).bernoulli_(1 - p, generator=generator) / (1 - p)


FORWARD: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_efficient_attention": efficient,
}
"""Each takes the generator that it drops weights by first, None if it drops none."""

BACKWARD: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
