"""Which operators can be issued again, and which `recompute="selective"` keeps."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from graphshard.cost.op_cost import (
    attention_backward_flops,
    attention_flops,
    equivalent_flops,
    op_cost,
)
from graphshard.program.program import FORWARD
from graphshard.recompute.regions import (
    compute_intensive_packets,
    is_compute_intensive,
    recomputable,
)

aten = torch.ops.aten


def node_of(target, *args, **kwargs) -> fx.Node:
    node = fx.Graph().call_function(target, args, kwargs)
    node.meta.update(phase=FORWARD, val=(torch.empty(2), torch.empty(2)))
    return node


def test_attention_with_dropout_is_saved_with_its_seeds():
    attention = aten._scaled_dot_product_flash_attention.default
    q = torch.empty(1)
    assert recomputable(node_of(attention, q, q, q, 0.0))
    assert not recomputable(node_of(attention, q, q, q, 0.1))
    assert is_compute_intensive(node_of(attention, q, q, q))
    assert not recomputable(node_of(aten.bernoulli.p, q, 0.5))
    assert not recomputable(node_of(aten.add_.Tensor, q, q))


def test_the_list_of_what_selective_keeps():
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"):
        assert getattr(aten, name) in compute_intensive_packets()
    assert aten.add not in compute_intensive_packets()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_costs_what_torch_counts(kv_heads):
    """Also of grouped-query attention, which torch 2.11 does not count."""
    q, kv = (2, 4, 16, 8), (2, kv_heads, 24, 8)
    whole = (2, 4, 24, 8)
    assert attention_flops(q, kv, kv) == sdpa_flop_count(q, whole, whole)
    counted = sdpa_backward_flop_count(q, q, whole, whole)
    assert attention_backward_flops(q, kv, kv) == counted
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "qkv"]
    for node, shape in zip(given, (q, kv, kv), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    node = graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (*given,))
    node.meta.update(phase=FORWARD, val=(given[0].meta["val"], torch.empty(2)))
    assert op_cost(node).flops == sdpa_flop_count(q, whole, whole)
    assert equivalent_flops(node) > sdpa_flop_count(q, whole, whole)
