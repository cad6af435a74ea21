"""FLOPs of fused attention, from the shapes of its operands.

They equal those of `torch.utils.flop_counter`, which before torch 2.13 refuses grouped-query
attention, where keys and values have fewer heads than the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_aten = torch.ops.aten


FORWARD = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    }
)
"""Operators (overload packets) whose first operands are query, key and value."""


BACKWARD = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
        _aten._scaled_dot_product_flash_attention_backward,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_cudnn_attention_backward,
    }
)
"""Operators whose first operands are the gradient of the result, query, key and value."""


def forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Count the FLOPs of two products, queries by keys and scores by values, without a mask.

    Args:
        query: its shape `(batch, heads, tokens, width)`.
        key: its shape `(batch, key heads, key tokens, width)`; a key head serves the same number
            of query heads.
        value: its shape `(batch, key heads, key tokens, value width)`.
    """
    return 2 * _scores(query, key) * (query[3] + value[3])


def backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Count the FLOPs of five products, as FlashAttention recomputes the scores.

    The arguments are those of `forward_flops`.
    """
    return 2 * _scores(query, key) * (3 * query[3] + 2 * value[3])


def _scores(query: Sequence[int], key: Sequence[int]) -> int:
    """The number of attention scores."""
    batch, heads, tokens, _ = query
    return batch * heads * tokens * key[2]
