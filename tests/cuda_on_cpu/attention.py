"""CUDA's fused attention by the CPU's, and by its formula where it drops weights.

The operators differ in their arguments and in what they keep for backward. What is dropped is drawn
again in backward, from a seed that forward keeps where CUDA's kernels keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
    out, lse, seed = _Attention(q, k, v, None, p, causal, scale).forward(seeded)
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
    return _Attention(q, k, v, None, p, causal, scale).gradients(seed, grad)[:3]


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
    out, lse, seed = _Attention(q, k, v, bias, p, causal, scale).forward(seeded)
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
    attention = _Attention(q, k, v, bias, p, causal, scale)
    return attention.gradients(int(seed), grad)[: 3 + wanted[3]]


@dataclass(frozen=True)
class _Attention:
    """softmax(q @ k.T * scale + bias) @ v by its formula, where each weight is dropped by p."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    p: float
    causal: bool
    scale: float | None

    def forward(self, seeded: Seeded) -> tuple[Tensor, Tensor, int]:
        """(result, logarithms of the sums of weights, seed of what was dropped)."""
        q, k, v = self.q, self.k, self.v
        if seeded is None:
            out = _CPU(q, k, v, 0.0, self.causal, attn_mask=self.bias, scale=self.scale)
            return *out, 0
        seed = seeded().initial_seed()
        scores = self._scores()
        weights = scores.softmax(-1) * self._kept(seed, scores)
        return weights.to(v.dtype) @ v, scores.logsumexp(-1), seed

    def gradients(self, seed: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, value and bias."""
        q, k, v = self.q, self.k, self.v
        scores = self._scores()
        weights, kept = scores.softmax(-1), self._kept(seed, scores)
        of_v = (weights * kept).to(v.dtype).mT @ grad
        of_weights = (grad @ v.mT).float() * kept
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        of_q = (of_scores @ k.float() * self._factor).to(q.dtype)
        of_k = (of_scores.mT @ q.float() * self._factor).to(k.dtype)
        return of_q, of_k, of_v, of_scores.to(q.dtype)

    @property
    def _factor(self) -> float:
        return 1 / math.sqrt(self.q.size(-1)) if self.scale is None else self.scale

    def _scores(self) -> Tensor:
        scores = self.q.float() @ self.k.float().mT * self._factor
        if self.bias is not None:
            scores = scores + self.bias
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores

    def _kept(self, seed: int, scores: Tensor) -> Tensor:
        """The factor of each weight: 0, or more than 1."""
        if self.p == 0:
            return torch.ones_like(scores)
        generator = torch.Generator().manual_seed(seed)
        return torch.empty_like(scores).bernoulli_(1 - self.p, generator=generator) / (1 - self.p)


FORWARD: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_efficient_attention": efficient,
}
"""Each takes the generator that it drops weights by first, None if it drops none."""

BACKWARD: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
