"""The operators whose results "selective" recompute keeps, and what operators cost.

Matrix products and attention hold nearly all the arithmetic of a model but a part of what is saved;
the rest is bound by memory bandwidth and cheap to do again. torch's selective activation
checkpointing (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) is used this way, as
in torchtitan's selective mode per operator, which however saves only every second matrix product;
here each one is kept. The list is that of the compute-intensive operators of torch's partitioner
(`torch._functorch.partitioners`), with those that later versions added.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from graphshard import attention_work
from graphshard.step_memory import bytes_of
from graphshard.torch_compat import size_hint
from graphshard.views import alias_inputs

_NAMES = """
    mm addmm bmm baddbmm addbmm matmul linear mv addmv dot _scaled_mm _grouped_mm _scaled_grouped_mm
    convolution _convolution
    scaled_dot_product_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math _flash_attention_forward _efficient_attention_forward
    _cudnn_attention_forward
"""

FLOPS_PER_BYTE = 200
"""What moving a byte costs, in FLOPs: the balance of bf16 arithmetic to memory bandwidth, which is
156 on an A100 (312 TFLOP/s, 2.0 TB/s) and 295 on an H100 SXM (989 TFLOP/s, 3.35 TB/s)."""

_aten = torch.ops.aten


@cache
def heavy_packets() -> frozenset[Any]:
    """The operators (overload packets) kept, of those this torch has."""
    return frozenset(getattr(_aten, name) for name in _NAMES.split() if hasattr(_aten, name))


def is_heavy(node: fx.Node) -> bool:
    """Whether `node` is a matrix product, a convolution or attention, or picks out its result."""
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return getattr(node.target, "overloadpacket", None) in heavy_packets()


def cost_of(node: fx.Node) -> int:
    """What computing `node` costs, in FLOPs: its own, and those its memory traffic is worth.

    Own FLOPs are those of torch's flop counter; operators it does not know have none. Views and
    picking out a result are free.
    """
    if node.target is getitem or alias_inputs(node):
        return 0
    moved = sum(bytes_of(tensor) for tensor in _tensors(node.meta.get("val")))
    moved += sum(
        bytes_of(tensor)
        for source in node.all_input_nodes
        for tensor in _tensors(source.meta.get("val"))
    )
    return _flops(node) + FLOPS_PER_BYTE * moved


def _flops(node: fx.Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in attention_work.FORWARD:
        operands: Any = node.args[:3]
        return attention_work.forward_flops(*(_concrete(n.meta["val"]).shape for n in operands))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    found = tree_map(_concrete, (args, kwargs, node.meta["val"]))
    return int(formula(*found[0], **found[1], out_val=found[2]))


def _concrete(value: Any) -> Any:
    """`value` with the sizes of the call captured: to ask a symbol would be to fix it."""
    if isinstance(value, Tensor):
        return torch.empty([size_hint(size) for size in value.shape], device="meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _tensors(val: Any) -> Iterator[Tensor]:
    if isinstance(val, Tensor):
        yield val
    elif isinstance(val, (tuple, list)):
        for part in val:
            yield from _tensors(part)
