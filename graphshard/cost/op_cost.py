"""Seconds of one compute node: a roofline of FLOPs and bytes, or a measured curve.

FLOPs come from torch's registry (`torch.utils.flop_counter`), and bytes from the shapes of the
tensors that a node reads and writes. Views and selections of one result cost nothing. Attention
costs what the fused kernel of an accelerator does, even if it was traced on the CPU. Calibrated
hardware has curves of seconds by operator, which include launch, cache and peak effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import conv_flop_count, flop_registry

from graphshard.cost.kernel_rates import (
    EFFICIENT,
    Attention,
    Product,
    attention_kernel,
    attention_rate,
    convolution_rate,
    product_rate,
)
from graphshard.hardware.curves import seconds_at
from graphshard.hardware.hardware import Hardware, dtype_name
from graphshard.program.aliases import is_view_op
from graphshard.torch_private.compat import size_hint

_LIKE = {
    "gelu": ("erf", "mish", "tanh", "sin", "cos", "exp", "expm1", "log", "log1p", "sigmoid",
             "atan2"),
    "silu": ("hardswish", "elu", "softplus", "logit", "log_sigmoid_forward"),
    "gelu_backward": ("mish_backward", "elu_backward", "softplus_backward"),
    "silu_backward": ("hardswish_backward", "tanh_backward", "sigmoid_backward"),
    "pow": ("sqrt", "rsqrt", "reciprocal"),
    "sum": ("mean", "amax", "amin", "var", "var_mean", "std", "linalg_vector_norm", "norm", "prod",
            "max", "min", "argmax", "argmin", "any", "all", "logsumexp", "cumsum", "avg_pool2d",
            "adaptive_avg_pool2d", "_adaptive_avg_pool2d"),
    "_softmax": ("_log_softmax",),
    "_softmax_backward_data": ("_log_softmax_backward_data",),
    "native_layer_norm": ("native_group_norm", "_fused_rms_norm", "rms_norm"),
    "native_layer_norm_backward": ("native_group_norm_backward", "_fused_rms_norm_backward"),
    "native_batch_norm": ("_native_batch_norm_legit", "_native_batch_norm_legit_functional",
                          "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
                          "_batch_norm_with_update_functional", "cudnn_batch_norm"),
    "native_batch_norm_backward": ("batch_norm_backward", "cudnn_batch_norm_backward"),
    "native_dropout": ("bernoulli", "rand", "rand_like", "randn", "randn_like", "rrelu_with_noise"),
    "native_dropout_backward": ("masked_fill", "where"),
    "embedding": ("index_select",),
    "index": ("gather",),
    "embedding_dense_backward": ("index_add", "scatter_add"),
    "index_put": ("_unsafe_index_put", "scatter", "scatter_reduce", "select_scatter",
                  "slice_scatter"),
    "slice_backward": ("select_backward", "constant_pad_nd", "new_zeros", "zeros", "zeros_like",
                       "full", "full_like", "fill", "new_ones", "ones", "ones_like", "new_full"),
    "cat": ("stack", "repeat", "roll", "flip"),
    "clone": ("_to_copy", "copy", "convert_element_type", "_reshape_copy"),
    "topk": ("sort", "argsort"),
    "_safe_softmax": (),
    "max_pool2d_with_indices": (),
    "max_pool2d_with_indices_backward": (),
}  # fmt: skip


RELATIVES = {name: like for like, names in _LIKE.items() for name in (like, *names)}
"""By operator name, the operator whose curve is used for it."""


ELEMENTWISE = "add"
"""The curve of all other operators."""


STRIDED = ".strided"
"""Suffix of a curve that was measured with non-contiguous operands."""


_BY_LAYOUT = {ELEMENTWISE, "clone", "gelu", "silu"}


def curves_of(packet: Any, kind: str, node: fx.Node) -> tuple[str, ...]:
    """Names of the curves that apply to a call of an operator, the best first."""
    name = _name(packet)
    if kind == "attention":
        family = "attention_backward" if name.endswith("_backward") else "attention"
        return (f"{family}.causal", family) if _is_causal(node) else (family,)
    if kind == "convolution":
        return _convolution_curves(name, node)
    if kind == "matmul":
        if name in ("bmm", "baddbmm"):
            return ("bmm", "matmul")
        return ("grouped_mm", "matmul") if name == "_grouped_mm" else ("matmul",)
    like = RELATIVES.get(name, ELEMENTWISE)
    if like in _BY_LAYOUT and _strided(node):
        return (f"{like}{STRIDED}", f"{ELEMENTWISE}{STRIDED}", like, ELEMENTWISE)
    return (like, ELEMENTWISE)


@cache
def _name(packet: Any) -> str:
    return str(packet).rpartition(".")[2]


def _is_causal(node: fx.Node) -> bool:
    return any(name == "is_causal" and value for name, value in _arguments(node))


def _convolution_curves(name: str, node: fx.Node) -> tuple[str, ...]:
    """Curves by window size, stride and groups, on which libraries choose their algorithm."""
    family = "convolution_backward" if name.endswith("_backward") else "convolution"
    backward = family == "convolution_backward"
    weight: Any = node.args[2 if backward else 1]
    rest: Any = node.args[4:] if backward else node.args[3:]
    stride, groups = rest[0], rest[5]
    shape = family
    if groups > 1:
        shape += ".grouped"
    elif prod(map(size_hint, weight.meta["val"].shape[2:])) == 1:
        shape += ".pointwise"
    return (shape if max(stride) == 1 else f"{shape}{STRIDED}", shape, family)


def _strided(node: fx.Node) -> bool:
    """Whether an operand with at least as many dimensions as the result is not contiguous."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return False
    for value in node.all_input_nodes:
        operand = value.meta.get("val")
        if isinstance(operand, torch.Tensor) and operand.dim() >= result.dim():
            sizes = [size_hint(size) for size in operand.shape]
            expected = 1
            for size, stride in zip(reversed(sizes), reversed(operand.stride()), strict=True):
                if size != 1 and size_hint(stride) != expected:
                    return True
                expected *= size
    return False


_aten = torch.ops.aten


ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    }
)
"""Operators (overload packets) whose first operands are query, key and value."""


ATTENTION_BACKWARD = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
        _aten._scaled_dot_product_flash_attention_backward,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_cudnn_attention_backward,
    }
)
"""Operators whose first operands are the gradient of the result, query, key and value."""


_CONVOLUTIONS = {_aten.convolution, _aten.convolution_backward, _aten._convolution}


# Operators that read only the elements of their first operand that they return.
_SELECTIONS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select}


VIEW = "view"
"""The name of the curve of a view, which is a call without a kernel."""


@dataclass(frozen=True)
class OpCost:
    """The cost of one node.

    kind: "matmul", "attention", "convolution", "bandwidth", or "free" (a view). flops: those of the
    algorithm that runs. moved: bytes read and written. dtype: the dtype of the computation. curves:
    names of measured curves that apply, the best first. work: the shape of a matrix product or of
    attention.
    """

    kind: str
    flops: int
    moved: int
    dtype: torch.dtype
    curves: tuple[str, ...] = ()
    work: Product | Attention | None = None

    @property
    def only_moves(self) -> bool:
        """Whether it is a kernel that computes nothing but reads and writes memory."""
        return not self.flops and self.moved > 0

    def seconds(self, hardware: Hardware, *, tf32: bool = False) -> float:
        """Seconds within a step on one device, by a measured curve or else by the roofline.

        `tf32` says whether float32 products run in TF32.
        """
        return hardware.in_step * self._alone(hardware, tf32)

    def _alone(self, hardware: Hardware, tf32: bool) -> float:
        if hardware.curves:
            measured = self._measured(hardware, tf32)
            if measured is not None:
                return measured
        if self.kind == "free":
            return 0.0
        streamed = self.moved / (hardware.memory_bandwidth * hardware.efficiency["bandwidth"])
        computed = 0.0
        if self.flops:
            peak = hardware.matmul_flops(self.dtype, tf32=tf32)
            computed = self.flops / (peak * self._rate(hardware, tf32))
        return max(streamed, computed, hardware.launch_floor)

    def kernel(self, hardware: Hardware, *, tf32: bool = False) -> str:
        """The attention kernel by whose rates it is priced; "" if it is priced otherwise."""
        if not isinstance(self.work, Attention):
            return ""
        if hardware.curves and self._measured(hardware, tf32) is not None:
            return ""
        return attention_kernel(self.work, self.dtype, hardware)

    def _rate(self, hardware: Hardware, tf32: bool) -> float:
        if isinstance(self.work, Attention):
            return attention_rate(self.work, self.dtype, hardware)
        if self.kind == "attention":
            return hardware.efficiency_of(self.kind, self.dtype, tf32=tf32)
        if self.kind == "convolution":
            return convolution_rate(self.dtype, hardware, tf32=tf32)
        return product_rate(self.work, self.dtype, hardware, tf32=tf32)

    def _measured(self, hardware: Hardware, tf32: bool) -> float | None:
        """Seconds by the best measured curve; None without one.

        Products in another dtype than float32 need a curve of that dtype. Operators without FLOPs
        use the float32 curve if their dtype was not measured.
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
                # The operands of a thin product may take longer to read than to multiply.
                return max(seconds, seconds_at(stream, self.moved)) if stream else seconds
        return None


FREE = OpCost("free", 0, 0, torch.float32)


_VIEW = OpCost("free", 0, 0, torch.float32, (VIEW,))


def op_cost(node: fx.Node) -> OpCost:
    """The cost of a compute node of a program; `FREE` for other nodes.

    It is kept with the node and its copies, until the target, a constant or a value is another one.
    """
    if getattr(node.target, "overloadpacket", None) is None:
        return FREE  # communication, selecting one of several results, arithmetic on sizes
    values = [node.meta.get("val"), *(value.meta.get("val") for value in node.all_input_nodes)]
    constants = _constant((node.target, *node.args, *node.kwargs.items()))
    known, of, cost = node.meta.get("cost", ((), None, FREE))
    if of != constants or len(known) != len(values) or not all(map(is_, known, values)):
        cost = _computed(node)
        node.meta["cost"] = values, constants, cost
    return cast("OpCost", cost)


def _constant(arg: Any) -> Any:
    """`arg` with each node in it replaced by `_VALUE`."""
    if isinstance(arg, fx.Node):
        return _VALUE
    return tuple(map(_constant, arg)) if isinstance(arg, (list, tuple)) else arg


_VALUE = object()


def _computed(node: fx.Node) -> OpCost:
    if is_view_op(node.target):
        return _VIEW
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    results = list(tensors_in(node.meta.get("val")))
    if not results:
        return FREE
    operands = [each for n in node.all_input_nodes for each in tensors_in(n.meta.get("val"))]
    moved = sum(map(_stored_bytes, results))
    if packet in _SELECTIONS:
        moved *= 2
        operands = operands[1:]
    moved += sum(map(_stored_bytes, operands))
    reals = [t.dtype.to_real() for t in (*operands, *results)]
    floats = [dtype for dtype in reals if dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float32
    flops = _flops(packet, node)
    if results[0].is_complex():  # each product of two numbers is four of reals
        flops *= 4
    kind = _kind(packet, flops)
    work = _work(packet, kind, flops, node, results[0])
    return OpCost(kind, flops, moved, dtype, curves_of(packet, kind, node), work)


def _kind(packet: Any, flops: int) -> str:
    if packet in ATTENTION or packet in ATTENTION_BACKWARD:
        return "attention"
    if packet in _CONVOLUTIONS:
        return "convolution"
    return "matmul" if flops else "bandwidth"


_BATCHED = {_aten.bmm, _aten.baddbmm, _aten._grouped_mm}


# The kernels that operators traced on a GPU call; one traced on the CPU for a GPU does not say.
_KERNELS = {
    _aten._scaled_dot_product_cudnn_attention: "cudnn",
    _aten._scaled_dot_product_cudnn_attention_backward: "cudnn",
    _aten._scaled_dot_product_flash_attention: "fa2",
    _aten._scaled_dot_product_flash_attention_backward: "fa2",
    _aten._scaled_dot_product_efficient_attention: EFFICIENT,
    _aten._scaled_dot_product_efficient_attention_backward: EFFICIENT,
}


def _work(
    packet: Any, kind: str, flops: int, node: fx.Node, result: Tensor
) -> Product | Attention | None:
    """The shape of the matrix product or attention that `node` computes."""
    if kind == "attention":
        backward = packet in ATTENTION_BACKWARD
        query, key = _shapes_of_arguments(node.args[1:3] if backward else node.args[:2])
        on_gpu = result.device.type != "cpu"
        kernel = _KERNELS.get(packet, "") if on_gpu else ""
        return Attention(kernel, key[2], query[3], backward, _has_mask(node))
    shape = _shapes(result)
    if kind != "matmul" or not prod(shape):
        return None
    batch = prod(shape[:-2]) if packet in _BATCHED else 1
    columns = shape[-1] if len(shape) > 1 else 1
    rows = prod(shape) // (batch * columns)
    return Product(batch, rows, columns, max(1, flops // (2 * prod(shape))))


def _has_mask(node: fx.Node) -> bool:
    """Whether a call of attention has a mask as a tensor, under the names that kernels have."""
    arguments = _arguments(node)
    return any(name in ("attn_mask", "attn_bias") and mask is not None for name, mask in arguments)


def _flops(packet: Any, node: fx.Node) -> int:
    """FLOPs of the kernel that runs on an accelerator."""
    if packet is _aten._grouped_mm:
        return _grouped_flops(*(_shapes(n.meta["val"]) for n in (*node.args[:2], node)))  # type: ignore[union-attr]
    if packet in ATTENTION:
        return _causal(node, _counted_flops(packet, node))
    if packet in ATTENTION_BACKWARD:
        shapes = _shapes_of_arguments(node.args[1:4])
        return _causal(node, attention_backward_flops(*shapes))
    if packet is _aten.convolution_backward:
        # Torch counts the gradient of a grouped weight once per group. Each costs one forward.
        args = _shapes_of_arguments(node.args)
        grad, operand, weight = args[:3]
        transposed, mask = args[7], args[10]
        once = conv_flop_count(operand, weight, grad, transposed=transposed)
        return int((bool(mask[0]) + bool(mask[1])) * once)
    return _counted_flops(packet, node)


def _counted_flops(packet: Any, node: fx.Node) -> int:
    """FLOPs by torch's counter, attention without a mask; 0 for operators it does not count."""
    if packet in ATTENTION:
        return attention_flops(*_shapes_of_arguments(node.args[:3]))
    count = flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs = _shapes_of_arguments(node.args), _shapes_of_arguments(node.kwargs)
    return int(count(*args, **kwargs, out_val=_shapes(node.meta["val"])))


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """FLOPs of two products, queries by keys and scores by values, without a mask.

    The shapes are `(batch, heads, tokens, width)`. The results equal those of
    `torch.utils.flop_counter`, which before torch 2.13 refuses keys with fewer heads than queries.
    """
    return 2 * _scores(query, key) * (query[3] + value[3])


def attention_backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """FLOPs of five products, as FlashAttention recomputes the scores."""
    return 2 * _scores(query, key) * (3 * query[3] + 2 * value[3])


def _scores(query: Sequence[int], key: Sequence[int]) -> int:
    batch, heads, tokens, _ = query
    return batch * heads * tokens * key[2]


def _shapes_of_arguments(arguments: Any) -> Any:
    """The arguments of a node, with each tensor replaced by its shape."""
    return fx.map_arg(arguments, lambda value: _shapes(value.meta.get("val")))


def _grouped_flops(left: torch.Size, right: torch.Size, result: torch.Size) -> int:
    """FLOPs of `_grouped_mm`, which torch does not count; each row belongs to one group."""
    if len(left) == len(right) == 2:  # the gradient of a weight, stacked by group
        return int(2 * prod(left) * right[-1])
    return int(2 * prod(result) * left[-1])


def _shapes(value: Any) -> Any:
    """`value` with tensors replaced by shapes, and symbolic sizes by those of the captured call."""
    if isinstance(value, torch.Tensor):
        return torch.Size([size_hint(size) for size in value.shape])
    if isinstance(value, (list, tuple)):
        return type(value)(map(_shapes, value))
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _causal(node: fx.Node, flops: int) -> int:
    """`flops` halved if the mask is causal, since kernels skip blocks above the diagonal."""
    return flops // 2 if _is_causal(node) else flops


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Names and values of the arguments of an ATen call, defaults included."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            yield argument.name, node.args[position]
        else:
            yield argument.name, node.kwargs.get(argument.name, argument.default_value)


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes of memory behind `tensor`, where an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    numel = prod(
        size_hint(size) for size, stride in sizes if not (type(stride) is int and stride == 0)
    )
    return numel * tensor.dtype.itemsize


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, which may be a nested list or tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)


FLOPS_PER_BYTE = 200
"""FLOPs that take as long as moving one byte, in bf16; see README.md of recompute."""


def equivalent_flops(node: fx.Node) -> int:
    """The cost of computing `node` in FLOPs, with `FLOPS_PER_BYTE` for each byte that it moves.

    Views and selections of one result cost 0.
    """
    cost = op_cost(node)
    return cost.flops + FLOPS_PER_BYTE * cost.moved
