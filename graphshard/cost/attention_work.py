"""FLOPs of fused attention, from the shapes of its operands.

As torch's own counter has them (`torch.utils.flop_counter`), which before 2.13 refuses keys and
values of fewer heads than the queries, as grouped-query attention has them.
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
"""Those whose first operands are the gradient of the result, query, key and value."""


def forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Of two products: queries by keys, and scores by values; nothing is taken off for a mask.

    Args:
        query: the shape `(batch, heads, tokens, width)`.
        key: `(batch, heads or fewer, tokens, width)`; each is shared by as many of the queries.
        value: likewise, of another width perhaps.
    """
    return 2 * _scores(query, key) * (query[3] + value[3])


def backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Of five products, as FlashAttention computes the scores again; see `forward_flops`."""
    return 2 * _scores(query, key) * (3 * query[3] + 2 * value[3])


def _scores(query: Sequence[int], key: Sequence[int]) -> int:
    batch, heads, tokens, _ = query
    return batch * heads * tokens * key[2]
