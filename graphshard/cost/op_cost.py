"""How long one compute node takes: a roofline of its FLOPs and its bytes, above a launch floor, or
what was measured of its like.

FLOPs come from torch's own registry (`torch.utils.flop_counter`), bytes from the shapes of what a
node reads and writes. An op that only makes a view, or picks out a result, costs nothing. Attention
is charged as the fused kernel that runs on an accelerator, also where it was traced as the CPU's.
Calibrated hardware has curves of seconds by operator, which hold all of it: floor, cache and peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import conv_flop_count, flop_registry

from graphshard.cost import attention_work
from graphshard.cost.op_curves import curves_of
from graphshard.cost.per_node import once_per_operation
from graphshard.hardware.curves import seconds_at
from graphshard.hardware.hardware import Hardware, dtype_name
from graphshard.program.aliases import alias_inputs, is_view_op
from graphshard.program.storages import bytes_of
from graphshard.torch_private.compat import size_hint

_aten = torch.ops.aten


_CONVOLUTIONS = {_aten.convolution, _aten.convolution_backward, _aten._convolution}


# Reads of its first operand only what its result has.
_PICKS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select}


VIEW = "view"
"""The curve of an operator that makes a view: a call without work."""


@dataclass(frozen=True)
class OpCost:
    """What one node costs.

    kind: "matmul", "attention", "convolution", "bandwidth", or "free" (a view). `flops` are those
    of the algorithm that runs, `moved` bytes read and written, `dtype` what is computed in,
    `curves` the names of measured curves that hold for it, the best first.
    """

    kind: str
    flops: int
    moved: int
    dtype: torch.dtype
    curves: tuple[str, ...] = ()

    def seconds(self, hardware: Hardware, *, tf32: bool = False) -> float:
        """The time on one device of `hardware`: as measured, or else the roofline."""
        if hardware.curves:
            measured = self._measured(hardware, tf32)
            if measured is not None:
                return measured
        if self.kind == "free":
            return 0.0
        streamed = self.moved / (hardware.memory_bandwidth * hardware.efficiency["bandwidth"])
        computed = 0.0
        if self.flops:
            kind = self.kind if self.kind != "bandwidth" else "matmul"
            peak = hardware.matmul_flops(self.dtype, tf32=tf32)
            computed = self.flops / (peak * hardware.efficiency[kind])
        return max(streamed, computed, hardware.launch_floor)

    def _measured(self, hardware: Hardware, tf32: bool) -> float | None:
        """By the best curve there is; None without one.

        Products in another dtype than float32 have curves of their own or none. What streams bytes
        follows float32's, if its dtype was not measured.
        """
        if self.kind == "free":
            points = hardware.curves.get(VIEW) if self.curves else None
            return points[0][1] if points else None
        dtype = dtype_name(self.dtype, tf32=tf32 and self.flops > 0)
        amount = self.flops or self.moved
        for name in self.curves:
            points = hardware.curves.get(name if dtype == "float32" else f"{name}.{dtype}")
            if points is None and not self.flops:
                points = hardware.curves.get(name)
            if points is not None:
                seconds = seconds_at(points, amount)
                stream = hardware.curves.get("add")
                # A product may be so thin that its operands take longer to read than to multiply.
                return max(seconds, seconds_at(stream, self.moved)) if stream else seconds
        return None


FREE = OpCost("free", 0, 0, torch.float32)


_VIEW = OpCost("free", 0, 0, torch.float32, (VIEW,))


def op_cost(node: fx.Node) -> OpCost:
    """The cost of a compute node of a program; of any other, and of views, nothing.

    Kept with the node and for nodes equal to it (see `graphshard.cost.per_node`).
    """
    if getattr(node.target, "overloadpacket", None) is None:
        return FREE  # communication, picking out a result, arithmetic on sizes
    return _op_cost(node)


def _computed(node: fx.Node) -> OpCost:
    if is_view_op(node.target):
        return _VIEW
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    results = list(_tensors(node.meta.get("val")))
    if not results:
        return FREE
    operands = _operands(node)
    moved = sum(map(_stored_bytes, results))
    if packet in _PICKS:
        moved *= 2
        operands = operands[1:]
    moved += sum(map(_stored_bytes, operands))
    floats = [t.dtype for t in (*operands, *results) if t.dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    flops = _flops(packet, node)
    kind = _kind(packet, flops)
    return OpCost(kind, flops, moved, dtype, curves_of(packet, kind, node))


_op_cost = once_per_operation("cost", _computed)


def _kind(packet: Any, flops: int) -> str:
    if packet in attention_work.FORWARD or packet in attention_work.BACKWARD:
        return "attention"
    if packet in _CONVOLUTIONS:
        return "convolution"
    return "matmul" if flops else "bandwidth"


def _flops(packet: Any, node: fx.Node) -> int:
    """FLOPs of the kernel that runs."""
    if packet is _aten._grouped_mm:
        return _grouped_flops(*(_shapes(n.meta["val"]) for n in (*node.args[:2], node)))  # type: ignore[union-attr]
    if packet in attention_work.FORWARD:
        return _causal(node, _counted_flops(packet, node))
    if packet in attention_work.BACKWARD:
        shapes = _shapes_of_arguments(node.args[1:4])
        return _causal(node, attention_work.backward_flops(*shapes))
    if packet is _aten.convolution_backward:
        # Torch counts a grouped weight's gradient once per group. Each gradient costs one forward.
        args = _shapes_of_arguments(node.args)
        grad, operand, weight = args[:3]
        transposed, mask = args[7], args[10]
        once = conv_flop_count(operand, weight, grad, transposed=transposed)
        return int((bool(mask[0]) + bool(mask[1])) * once)
    return _counted_flops(packet, node)


def _counted_flops(packet: Any, node: fx.Node) -> int:
    """FLOPs by torch's counter, attention without a mask; 0 for operators it does not know."""
    if packet in attention_work.FORWARD:
        return attention_work.forward_flops(*_shapes_of_arguments(node.args[:3]))
    count = flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs = _shapes_of_arguments(node.args), _shapes_of_arguments(node.kwargs)
    return int(count(*args, **kwargs, out_val=_shapes(node.meta["val"])))


def _shapes_of_arguments(arguments: Any) -> Any:
    """Arguments of a node, with the shape of each tensor in its place."""
    return fx.map_arg(arguments, lambda value: _shapes(value.meta.get("val")))


def _grouped_flops(left: torch.Size, right: torch.Size, result: torch.Size) -> int:
    """Of products over groups of rows, which torch does not count: each row is in one group."""
    if len(left) == len(right) == 2:  # a weight's gradient, stacked by group
        return int(2 * prod(left) * right[-1])
    return int(2 * prod(result) * left[-1])


def _shapes(value: Any) -> Any:
    """A value with shapes for tensors, each symbolic size as in the call captured."""
    if isinstance(value, torch.Tensor):
        return torch.Size([size_hint(size) for size in value.shape])
    if isinstance(value, (list, tuple)):
        return type(value)(map(_shapes, value))
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _causal(node: fx.Node, flops: int) -> int:
    """FLOPs under a causal mask, whose blocks above the diagonal are skipped."""
    for argument, value in _arguments(node):
        if argument == "is_causal":
            return flops // 2 if value else flops
    return flops


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            yield argument.name, node.args[position]
        else:
            yield argument.name, node.kwargs.get(argument.name, argument.default_value)


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes in memory behind `tensor`: an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    numel = prod(
        size_hint(size) for size, stride in sizes if not (type(stride) is int and stride == 0)
    )
    return numel * tensor.dtype.itemsize


def _operands(node: fx.Node) -> list[Tensor]:
    """The tensors that `node` reads."""
    return [tensor for value in node.all_input_nodes for tensor in _tensors(value.meta.get("val"))]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


FLOPS_PER_BYTE = 200
"""What moving a byte costs, in FLOPs: the balance of bf16 arithmetic to memory bandwidth, which is
156 on an A100 (312 TFLOP/s, 2.0 TB/s) and 295 on an H100 SXM (989 TFLOP/s, 3.35 TB/s)."""


def cost_of(node: fx.Node) -> int:
    """What computing `node` costs, in FLOPs: its own, and those its memory traffic is worth.

    Own FLOPs are those of torch's flop counter; operators it does not know have none. Views and
    picking out a result are free.
    """
    if node.target is getitem or alias_inputs(node):
        return 0
    tensors = [*_tensors(node.meta.get("val")), *_operands(node)]
    packet = getattr(node.target, "overloadpacket", None)
    return _counted_flops(packet, node) + FLOPS_PER_BYTE * sum(map(bytes_of, tensors))
