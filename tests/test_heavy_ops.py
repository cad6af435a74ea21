"""Which operators can be issued again, and which `recompute="selective"` keeps."""

from __future__ import annotations

import torch
from torch import fx

from graphshard.heavy_ops import heavy_packets, is_heavy
from graphshard.program import FORWARD
from graphshard.remat import recomputable

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
    assert is_heavy(node_of(attention, q, q, q))
    assert not recomputable(node_of(aten.bernoulli.p, q, 0.5))
    assert not recomputable(node_of(aten.add_.Tensor, q, q))


def test_the_list_of_what_selective_keeps():
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"):
        assert getattr(aten, name) in heavy_packets()
    assert aten.add not in heavy_packets()
